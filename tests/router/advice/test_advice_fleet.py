"""Virtual engines from engines' statistics: whose steps are used, and what is refused."""

from __future__ import annotations

import random
import time
from types import SimpleNamespace
from typing import Any

import pytest

from engine.latency import FittedLatency, StepWork, find_profile, profile_fields
from engine.protocol import ALL_CAPABILITIES, BadRequest
from router.advice.advisor import FLEET_BYTES, _confined
from router.advice.engine_facts import MOST_ENGINES, engine_facts
from router.advice.fleet import ASSUMED_PUT, fit_fleet, virtual_fleet
from router.advice.worker import shaken
from router.engines.backend import Backend
from router.engines.circuit_breaker import CircuitBreaker

PACE = FittedLatency((4.0, 0.3, 0.0), (6.0, 0.0, 0.5), (6.0, 0.0, 0.5), large_batch=1)
GIVEN = profile_fields(find_profile("opt-13b@a100"))


def steps(count: int, slower: float = 1.0) -> list[tuple[float, ...]]:
    source, made = random.Random(3), []
    for number in range(count):
        if number % 2:
            tokens = source.randrange(8, 512)
            work = StepWork(tokens, tokens**2)
        else:
            decodes = source.randrange(1, 16)
            work = StepWork(0, 0, decodes, 100 * decodes)
        made.append((*work, slower * PACE.seconds(work)))
    return made


def facts(id: str, timed: Any, puts: Any = (), problem: str = "") -> dict[str, Any]:
    statistics = {
        "steps": timed, "puts": list(puts), "token_budget": 256, "max_batch": 7, "max_waiting": 9,
        "decode_slowdown": 2.0, "lease_ms": 1000,
    }  # fmt: skip
    return {
        "id": id, "role": "any", "model": "m", "layers": 4, "kv_bytes_per_token": 1000,
        "context_length": 8192, "page_size": 16, "pages": 100, "kv": "f",
        "capabilities": list(ALL_CAPABILITIES),
        "statistics": None if timed is None else statistics, "problem": problem,
    }  # fmt: skip


def test_an_engine_is_as_fast_as_its_own_steps_and_divides_its_work_as_it_does():
    told = fit_fleet([facts("a", steps(60)), facts("b", steps(60, 3.0))], None)
    one, other = virtual_fleet(told["fleet"], {"a": "prefill", "b": "decode"})
    work = StepWork(200, 40_000)
    assert one.profile.step.seconds(work) == pytest.approx(PACE.seconds(work), rel=0.02)
    assert other.profile.step.seconds(work) == pytest.approx(3 * PACE.seconds(work), rel=0.02)
    assert (one.config.engine_id, one.config.role, other.config.role) == ("a", "prefill", "decode")
    assert (one.config.token_budget, one.config.max_batch, one.config.max_waiting) == (256, 7, 9)
    assert (one.config.decode_slowdown, one.config.lease_ms) == (2.0, 1000)
    assert one.profile.pool_tokens == 1600 and one.profile.context_length == 8192
    assert told["engines"][0]["steps"] == "its own steps"
    assert told["engines"][0]["fit"]["prefill"]["largest"] < 0.03
    assert told["engines"][0]["covers"]["decodes"] == [1, 15]
    assert told["notes"] == ["no engine has put KV to another yet: 1 GB/s is assumed"]


def test_a_bad_fit_is_noted():
    """Every third step takes five times as long as the model can know."""
    odd = [(*one[:4], one[4] * (5 if n % 3 else 1)) for n, one in enumerate(steps(60))]
    told = fit_fleet([facts("a", odd), facts("b", steps(60))], None)
    (bad,) = (note for note in told["notes"] if "fits badly" in note)
    assert bad.startswith("engine a: the latency model fits badly: half of the ")


def test_puts_are_those_of_the_engine_or_of_all_or_assumed():
    puts = [(1000 * n, 1e-3 * n) for n in range(1, 6)]
    told = fit_fleet([facts("a", steps(60), puts), facts("b", steps(60), puts[:1])], None)
    engines = virtual_fleet(told["fleet"], {"a": "any", "b": "any"})
    assert [one["puts"] for one in told["engines"]] == ["its own puts", "the puts of all engines"]
    assert [one.profile.put.bandwidth for one in engines] == [pytest.approx(1e6)] * 2
    told = fit_fleet([facts("a", steps(60), puts[:3])], None)
    (engine,) = virtual_fleet(told["fleet"], {"a": "any"})
    assert engine.profile.put == ASSUMED_PUT and told["notes"] == []  # a lone engine puts nothing
    told = fit_fleet([facts("a", steps(60))], GIVEN)
    assert told["engines"][0]["puts"] == "those of the given profile"


def test_an_engine_that_has_seen_too_little_is_taken_for_the_others():
    told = fit_fleet([facts("a", steps(60)), facts("b", steps(4))], GIVEN)
    assert told["engines"][1]["steps"] == "the steps of all engines"
    assert "engine b: at least 8 steps" in told["notes"][0]
    assert "the steps of all engines are used" in told["notes"][0]


def test_a_given_profile_is_for_engines_of_unknown_speed():
    told = fit_fleet([facts("a", None, problem="it did not tell")], GIVEN)
    (engine,) = virtual_fleet(told["fleet"], {"a": "any"})
    given = find_profile("opt-13b@a100")
    assert (engine.profile.step, engine.profile.put) == (given.step, given.put)
    assert engine.profile.layers == 4 and engine.profile.model == "m"  # the rest is the engine's
    assert "engine a: it did not tell; those of the given profile are used" in told["notes"]


@pytest.mark.processes
async def test_a_fleet_of_as_many_engines_as_there_may_be_is_fitted():
    """Its process tells each engine with a profile of its own."""
    many = [facts(f"engine-{n}", steps(256), problem="x" * 200) for n in range(MOST_ENGINES)]
    ended = await _confined("fit", {"engines": many, "profile": GIVEN}, 60, 60, most=FLEET_BYTES)
    assert len(ended.verdict["fleet"]) == MOST_ENGINES


@pytest.mark.parametrize(
    ("engine", "given", "said"),
    [
        (facts("a", None, problem="it hangs"), None, "engine a is of unknown speed: it hangs"),
        (facts("a", steps(6)), None, "3 were, with"),
        (facts("a", steps(60)), {"version": 1}, "the given profile: name: Field required"),
        (facts("a", steps(60)), {"version": 9}, "version 9 of a profile"),
        (facts("a", steps(60)), {}, "it has no version"),
    ],
)
def test_unknown_speeds_and_bad_profiles_are_refused(engine, given, said):
    with pytest.raises(BadRequest) as refused:
        fit_fleet([engine], given)
    assert said in refused.value.message and "\n" not in refused.value.message


def test_absurd_statistics_make_no_absurd_error():
    """An engine may say anything within the bounds of the message."""
    for timed in (
        [(2**31, 2**62, 2**31, 2**31, 1e-9)] * 50,
        [(1, 0, 0, 0, 3600.0), (2**31, 2**62, 0, 0, 1e-300)] * 20,
        [(n, 0, n, 0, 1e-3) for n in range(1, 60)],
    ):
        try:
            told = fit_fleet([facts("a", timed)], None)
        except BadRequest as error:
            assert "unknown speed" in error.message
        else:
            (engine,) = virtual_fleet(told["fleet"], {"a": "any"})
            assert engine.profile.step.seconds(StepWork(100, 10_000, 3, 900)) >= 0


def test_seed_0_is_the_traffic_as_it_was_and_others_move_its_bursts():
    arrivals = [0.0]
    for number in range(499):  # slow at first, then fast
        arrivals.append(arrivals[-1] + (1.0 if number < 100 else 0.1) * (1 + number % 3))
    assert shaken(arrivals, 0) == arrivals
    for seed in (1, 2):
        times = shaken(arrivals, seed)
        assert times == shaken(arrivals, seed) != shaken(arrivals, seed + 10)
        assert times == sorted(times) and len(times) == len(arrivals) and times[0] == 0.0
        # Not the same, but as fast as before, and in either half.
        assert times != arrivals
        assert times[100] == pytest.approx(arrivals[100], rel=0.25)
        assert times[-1] - times[100] == pytest.approx(arrivals[-1] - arrivals[100], rel=0.5)
    assert shaken([0.0], 3) == [0.0]


def test_an_engine_without_statistics_is_named_and_imitated_with_what_it_supports():
    can = [each for each in ALL_CAPABILITIES if each not in ("statistics", "mirror")]
    problem = "it tells no statistics of its steps"
    lacking = {**facts("b", None, problem=problem), "capabilities": can, "kv": "g"}
    told = fit_fleet([facts("a", steps(60)), lacking], None)
    assert f"engine b: {problem}; the steps of all engines are used" in told["notes"]
    one, other = virtual_fleet(told["fleet"], {"a": "any", "b": "any"})
    assert (one.kind.kv, other.kind.kv) == ("f", "g")
    assert one.kind.capabilities == ALL_CAPABILITIES and other.kind.capabilities == tuple(can)
    with pytest.raises(BadRequest, match=f"engine b is of unknown speed: {problem}"):
        fit_fleet([lacking], None)


async def test_an_engine_without_statistics_is_not_asked_for_them():
    model = SimpleNamespace(
        name="m", layers=1, kv_bytes_per_token=4, context_length=64, page_size=16,
        fingerprint="f", capabilities=["prep_recv"],
    )  # fmt: skip
    backend = Backend(SimpleNamespace(url="http://a:1"), CircuitBreaker(1, 1.0, time.monotonic))
    backend.model, backend.state = model, SimpleNamespace(pages=SimpleNamespace(total=7))
    (told,) = await engine_facts([backend])
    assert told["statistics"] is None and told["capabilities"] == ["prep_recv"]
    assert told["problem"] == "it tells no statistics of its steps"
