"""Routers that share engines and nothing else see each other's work there."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from engine_process import EngineProcess
from router_process import RouterProcess, until

from router.engines.load import STREAM_TOKENS

pytestmark = [pytest.mark.processes, pytest.mark.slow]
STREAMS = 4


@pytest.fixture(scope="module")
def engines() -> Iterator[list[EngineProcess]]:
    running = [EngineProcess("--step-ms", "20", secret="ab" * 32, model="mock") for _ in range(2)]
    try:
        yield running
    finally:
        for engine in running:
            engine.kill()


@pytest.fixture
def routers(engines: list[EngineProcess]) -> Iterator[list[RouterProcess]]:
    """One with the first engine only, and one with both."""
    urls = [engine.url for engine in engines]
    fast = ("--health-interval-s", "0.1")
    running = [
        RouterProcess(urls[:1], "data_parallel", *fast),
        RouterProcess(urls, "cache_aware", *fast),
    ]
    try:
        yield running
    finally:
        for router in running:
            router.kill()


def loads(router: RouterProcess) -> dict[str, dict[str, int]]:
    told: list[dict[str, Any]] = router.http.get("/admin/engines").json()["engines"]
    return {engine["url"]: engine["load"] for engine in told}


def test_requests_avoid_an_engine_that_is_busy_for_another_router(
    engines: list[EngineProcess], routers: list[RouterProcess]
) -> None:
    one, both = routers
    busy, free = (engine.url for engine in engines)
    assert [load["others"] for load in loads(both).values()] == [0, 0]
    streams = [
        threading.Thread(target=one.tokens, args=([n + 1] * 20, 300)) for n in range(STREAMS)
    ]
    for stream in streams:
        stream.start()
    until(lambda: loads(both)[busy]["others"] >= STREAMS * STREAM_TOKENS)
    before = {engine.url: engine.state()["generation_tokens"] for engine in engines}
    for n in range(4):
        both.tokens([100 + n] * 20, 2)
        assert loads(both)[free]["others"] == 0  # what it did there itself
    after = {engine.url: engine.state()["generation_tokens"] for engine in engines}
    assert after[free] - before[free] == 8
    for stream in streams:
        stream.join()
    until(lambda: not loads(both)[busy]["others"])
    assert all(load == {"tokens": 0, "streams": 0, "others": 0} for load in loads(both).values())
