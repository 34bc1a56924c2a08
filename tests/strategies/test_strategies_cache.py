"""The engines that the cache-aware strategies choose; the engines here only record calls."""

from __future__ import annotations

from contextlib import asynccontextmanager
from itertools import count
from types import SimpleNamespace

import pytest

from engine.protocol import Sampling
from router import Chunk, Pool, Request
from strategies.cache_aware import cache_aware
from strategies.migrate import migrate


class Engine:
    """An engine with `coming` tokens on their way into its cache, besides those cached."""

    def __init__(self, id: str, *, load: int = 0, cached: int = 0, coming: int = 0) -> None:
        self.id, self.load = id, load
        self.here, self.coming = cached, cached + coming
        self.calls: list[tuple[object, ...]] = []

    def can(self, capability):
        return True

    def sends_to(self, other):
        return True

    def cached(self, request, *, coming=True):
        return self.coming if coming else self.here

    @asynccontextmanager
    async def prep_recv(self, request, *, end):
        self.calls.append((self.id, "prep_recv", end))
        yield SimpleNamespace(match_len=min(self.here, end), end=end)
        self.calls.append((self.id, "left"))

    async def remote_send(self, request, kv, *, begin, end):
        self.calls.append((self.id, "remote_send", begin, end))

    async def commit(self, kv):
        self.calls.append((self.id, "commit", kv.end))
        self.coming = max(self.coming, kv.end)

    async def start_generate(self, request, *, begin=0):
        self.calls.append((self.id, "start_generate", begin))
        yield Chunk(token_ids=[1], finish_reason="stop")


async def calls_of(strategy, length, *engines, turns=None, **params):
    calls = []
    for engine in engines:
        engine.calls = calls
    turns = turns or count()
    registry = SimpleNamespace(turn=lambda pool: next(turns))
    attempt = SimpleNamespace(runtime=SimpleNamespace(registry=registry), alone=False)
    cluster = SimpleNamespace(engines=Pool(attempt, "engines", list(engines), list(engines)))
    request = Request("id", [0] * length, Sampling())
    assert len([chunk async for chunk in strategy.function(request, cluster, **params)]) == 1
    return calls


@pytest.mark.parametrize(
    ("a", "b", "weight", "chosen"),
    [
        ({}, {"cached": 16}, 0.5, "b"),
        ({"cached": 64}, {"cached": 16}, 0.5, "a"),
        ({"cached": 64, "load": 95}, {"cached": 16}, 0.5, "a"),
        ({"cached": 64, "load": 97}, {"cached": 16}, 0.5, "b"),
        ({"cached": 64, "load": 96}, {"cached": 16}, 0.5, "a"),  # a tie: the longer prefix wins
        ({"cached": 64, "load": 49}, {"cached": 16}, 1.0, "b"),
        ({"cached": 16, "load": 10**6}, {}, 0.0, "a"),
        ({"coming": 64}, {"cached": 48}, 0.5, "a"),
    ],
)
@pytest.mark.parametrize("turn", [0, 1])
async def test_cache_aware_minimizes_load_plus_missing_tokens(a, b, weight, chosen, turn):
    engines = Engine("a", **a), Engine("b", **b)
    calls = await calls_of(cache_aware, 100, *engines, turns=count(turn), load_weight=weight)
    assert [call[:2] for call in calls] == [(chosen, "start_generate")]


async def test_ties_alternate():
    turns, engines = count(), [Engine("a"), Engine("b"), Engine("c", load=1)]
    chosen = [(await calls_of(cache_aware, 50, *engines, turns=turns))[0][0] for _ in range(6)]
    assert set(chosen) == {"a", "b"}


async def test_cached_tokens_are_not_counted_as_load():
    calls = await calls_of(cache_aware, 100, Engine("a", cached=32, coming=32))
    assert calls == [("a", "start_generate", 64)]


@pytest.mark.parametrize("load", [0, 99, 100])
async def test_a_context_stays_on_its_engine_without_overload(load):
    engines = Engine("a", load=load, cached=64), Engine("b", cached=48)
    calls = await calls_of(migrate, 100, *engines, overload=100)
    assert calls == [("a", "start_generate", 64)]


async def test_of_engines_with_the_longest_prefix_the_least_loaded_is_chosen():
    engines = Engine("a", load=9, cached=64), Engine("b", load=7, cached=64), Engine("c")
    assert await calls_of(migrate, 100, *engines) == [("b", "start_generate", 64)]


async def test_a_context_is_moved_to_the_least_loaded_engine():
    engines = Engine("a", load=200, cached=64), Engine("b", load=50), Engine("c", cached=32)
    assert await calls_of(migrate, 100, *engines, overload=100) == [
        ("c", "prep_recv", 64),
        ("a", "remote_send", 32, 64),
        ("c", "commit", 64),
        ("c", "left"),
        ("c", "start_generate", 64),
    ]


async def test_a_prefix_still_being_computed_is_not_moved():
    """The overloaded sender would have to compute it a second time."""
    engines = Engine("a", load=200, cached=16, coming=48), Engine("b", cached=16)
    calls = await calls_of(migrate, 100, *engines, overload=100)
    assert [call[1] for call in calls] == ["prep_recv", "commit", "left", "start_generate"]
    assert calls[-1] == ("b", "start_generate", 16)
