"""Dry runs on engines like those of a fleet: what is refused, and what falls back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from engine.protocol import ALL_CAPABILITIES, BadRequest, Unsupported
from router.dry_run.dry_run import MOST_ALIKE, MOST_ENGINES, _sample, dry_run
from router.dry_run.dry_run_process import dry_run_source, dry_run_strategy
from router.dry_run.fleet_engine import FleetEngine, differ
from router.rollout.catalog import Catalog

PINS = """from router import strategy

@strategy
async def mine(request, cluster):
    engine = cluster.engines.least_loaded()
    await engine.pin(request)
    async for chunk in engine.start_generate(request):
        yield chunk
"""


def engine(id: str, *lacking: str, **fields: Any) -> FleetEngine:
    can = [each for each in ALL_CAPABILITIES if each not in lacking]
    whole: Mapping[str, Any] = {"role": "any", "page_size": 16, "kv": "f", **fields}
    return FleetEngine(id=id, capabilities=can, **whole)


def tried(name: str, *engines: FleetEngine, **params: Any) -> list[str]:
    """Run a built-in strategy dry; return its fallbacks."""
    fallbacks: set[str] = set()
    assert dry_run(Catalog()[name].bind(params), engines, fallbacks) > 100
    return sorted(fallbacks)


def test_engines_differ_by_what_they_lack_and_by_their_kv():
    assert not differ([]) and not differ([engine("a", page_size=32), engine("b", page_size=32)])
    assert differ([engine("a"), engine("b", "pin")])
    assert differ([engine("a"), engine("b", kv="g")])


def test_a_large_fleet_is_imitated_by_some_engines_of_each_kind():
    fleet = [engine(f"a{number}") for number in range(9)]
    fleet += [engine(f"b{number}", "pin") for number in range(9)]
    fleet += [engine("c", role="decode"), engine("d", page_size=32), engine("e", kv="g")]
    assert [one.id for one in _sample(fleet)] == ["a0", "a1", "b0", "b1", "c", "d", "e"]
    many = [engine(f"a{n}", kv=str(n)) for n in range(MOST_ENGINES + 3)]
    assert len(_sample(many)) == MOST_ENGINES and MOST_ALIKE == 2


@pytest.mark.parametrize(
    ("engines", "says"),
    [
        ([engine("a", "pin")], "strategy mine calls pin, which engine a does not support"),
        (
            [engine(name, "pin") for name in "abcde"],
            "strategy mine calls pin, which engines a, b, c, d, e do not support",
        ),
        (
            [engine(str(number), "pin") for number in range(20)],
            "strategy mine calls pin, which engines 0, 1, 2, 3, 4, 5, 6, 7, and 12 more do not "
            "support",
        ),
    ],
)
def test_a_call_that_the_fleet_lacks_is_refused(engines, says):
    mine = Catalog().load(PINS, file="mine.py")
    with pytest.raises(Unsupported) as refused:
        dry_run(mine.bind({}), engines)
    assert refused.value.message == says
    fallbacks: set[str] = set()
    dry_run(mine.bind({}), [engine("a", "pin"), engine("b")], fallbacks)
    assert fallbacks == {"unsupported"}  # another engine supports it
    dry_run(mine.bind({}), [engine("a"), engine("b", "pin"), engine("c", "pin")])


def test_a_role_that_lacks_a_call_is_refused_although_others_support_it():
    source = PINS.replace("cluster.engines.", "cluster.decode.")
    mine = Catalog().load(source, file="mine.py")
    decode = [engine(f"d{number}", "pin", role="decode") for number in range(2)]
    decode.append(engine("d2", "pin", role="decode", page_size=32))
    with pytest.raises(Unsupported, match="calls pin, which engines d0, d1, d2 do not support"):
        dry_run(mine.bind({}), [engine("p", role="prefill"), *decode])


BARE = tuple(each for each in ALL_CAPABILITIES if each not in ("prep_recv", "remote_send"))


@pytest.mark.parametrize(
    ("name", "fleet", "fallbacks"),
    [
        ("data_parallel", [engine("a", *ALL_CAPABILITIES), engine("b", *ALL_CAPABILITIES)], []),
        ("prefill_decode", [engine("a"), engine("b"), engine("c", kv="g")], ["not_sent"]),
        ("prefill_decode", [engine("a", *BARE), engine("b", *BARE)], []),
        ("prefill_decode", [engine("a", "remote_send"), engine("b", "remote_send")], ["not_sent"]),
        ("balanced", [engine("a", page_size=128), engine("b", kv="g")], ["not_sent"]),
        ("migrate", [engine("a", "prefixes"), engine("b")], ["prefixes_unknown"]),
        ("cache_aware", [engine("a", "prefixes"), engine("b")], ["prefixes_unknown"]),
        ("adaptive", [engine("a", "prefixes"), engine("b", kv="g")], ["prefixes_unknown"]),
        (
            "replicate", [engine("a", "mirror", page_size=32), engine("b", "mirror", page_size=32)],
            ["mirrors_committed_prefixes"],
        ),
        ("replicate", [engine("a", "mirror", "commit"), engine("b", "mirror")], ["unmirrored"]),
        ("replicate", [engine("a"), engine("b")], []),
    ],
)  # fmt: skip
@pytest.mark.slow
def test_built_in_strategies_fall_back_visibly(name, fleet, fallbacks):
    assert set(fallbacks) <= set(told := tried(name, *fleet))
    if not fallbacks:
        assert told == []


@pytest.mark.parametrize("name", ["prefill_decode", "balanced"])
@pytest.mark.parametrize("count", [2, 5])
def test_built_in_strategies_that_cannot_fall_back_are_refused(name, count):
    fleet = [engine(f"e{number}", "prep_recv") for number in range(count)]
    with pytest.raises(Unsupported, match=f"strategy {name} calls prep_recv, which engines e0, e1"):
        tried(name, *fleet)


@pytest.mark.processes
async def test_the_fleet_reaches_the_process_of_a_dry_run():
    with pytest.raises(Unsupported, match="mine calls pin, which engine a does not support"):
        await dry_run_source(PINS, file="mine.py", engines=[engine("a", "pin")])
    with pytest.raises(BadRequest):
        await dry_run_source("1/0", file="mine.py", engines=[engine("a", "pin")])
    fleet = [engine("a", "prefixes"), engine("b")]
    told = await dry_run_strategy("cache_aware", {}, fleet)
    assert told.fallbacks == ["prefixes_unknown"] and told.name == "cache_aware"
    assert (await dry_run_strategy("cache_aware", {})).fallbacks == []
