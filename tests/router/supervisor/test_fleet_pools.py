"""Pools: the names, cores, memory and arguments of their engines."""

from __future__ import annotations

import itertools

import pytest

from engine.protocol import BadRequest
from router.engines import parse_engine
from router.supervisor import pools
from router.supervisor.pools import Pool, engine_processes


def value(arguments: tuple[str, ...], flag: str) -> str:
    """Return the last value of a flag, the one that counts."""
    found = [after for name, after in itertools.pairwise(arguments) if name == flag]
    return found[-1] if found else ""


@pytest.fixture(autouse=True)
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools.os, "sched_getaffinity", lambda _pid: {3, 4, 5, 6})


def test_engines_have_names_of_their_pools_or_numbers():
    found = engine_processes((Pool(2), Pool(2, name="a"), Pool(1)))
    names = ["engine-0", "engine-1", "a-0", "a-1", "engine-2"]
    assert [one.name for one in found] == names
    assert [value(one.arguments, "--engine-id") for one in found] == names


def test_pools_of_one_role_have_flags_of_their_own():
    fast = Pool(1, "decode", flags={"tp": 2}, labels={"gpu": "a"})
    one, two = engine_processes((fast, Pool(1, "decode", arguments=("--tp", "4"))))
    assert (one.role, value(one.arguments, "--role"), value(one.arguments, "--tp")) == (
        ("decode", "decode", "2")
    )
    assert value(two.arguments, "--tp") == "4"
    assert (one.labels, two.labels) == ({"gpu": "a"}, {})


def test_each_engine_has_its_own_cores_unless_its_pool_chooses():
    one, two, three = engine_processes((Pool(2), Pool(1, flags={"threads": 9})))
    assert value(one.arguments, "--cpus") == "3"
    assert value(two.arguments, "--cpus") == "4"
    assert (value(three.arguments, "--cpus"), value(three.arguments, "--threads")) == ("", "9")
    assert value(one.arguments, "--memory-share") == "0.333333"


def test_more_engines_than_cores_have_one_thread_each():
    found = engine_processes((Pool(5),))
    assert [value(one.arguments, "--threads") for one in found] == ["1"] * 5
    assert not any(value(one.arguments, "--cpus") for one in found)
    assert engine_processes(()) == []


def test_an_engine_of_the_router_may_have_labels():
    entry = parse_engine("http://127.0.0.1:1 gpu=a zone=b")
    assert (entry.url, entry.role, entry.labels) == (
        "http://127.0.0.1:1",
        None,
        {"gpu": "a", "zone": "b"},
    )
    for wrong in ("", "http://127.0.0.1:1 gpu", "http://127.0.0.1:1 role=cook", "ftp://x"):
        with pytest.raises(BadRequest):
            parse_engine(wrong)
