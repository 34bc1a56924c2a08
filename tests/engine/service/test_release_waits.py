"""A release responds when the step loop has freed the pages, however long its step takes."""

from __future__ import annotations

import threading
from typing import Any

import httpx
from engine_helpers import at_rest, serving, start
from waiting import until

from kvcache.transport import MemoryNetwork

PROMPT = [(13 * n) % 250 for n in range(40)]


async def test_computed_pages_are_cached_before_the_release_responds(monkeypatch: Any):
    async with serving(MemoryNetwork(), api_key="k") as engine:
        run, go_on = engine.loop.stepper._runner.run, threading.Event()

        def slow(chunks: Any) -> Any:
            assert engine.loop.stats.steps < 30 or go_on.wait(20)
            return run(chunks)

        engine.loop.stepper._runner.run = slow  # type: ignore[method-assign]
        await engine.start_generate(start(PROMPT, "r", max_tokens=200))
        await until(lambda: engine.loop.stats.steps == 30)
        async with httpx.AsyncClient(headers={"Authorization": "Bearer k"}) as http:
            url = f"{engine.cache.identity.url}/microserving/release"
            threading.Timer(0.2, go_on.set).start()
            reply = await http.post(url, json={"request_id": "r"})
        assert reply.status_code == 200 and go_on.is_set()
        assert engine.cache.prefix_tokens == 64  # full pages of 40 and 30 tokens
        await at_rest(engine)


async def test_a_release_waits_for_a_stuck_loop_within_bounds(monkeypatch: Any):
    monkeypatch.setattr("engine.service.engine.FLUSH_TIMEOUT_S", 0.05)
    async with serving(MemoryNetwork(), api_key="k") as engine:
        run, go_on = engine.loop.stepper._runner.run, threading.Event()

        def stuck(chunks: Any) -> Any:
            assert go_on.wait(20)
            return run(chunks)

        engine.loop.stepper._runner.run = stuck  # type: ignore[method-assign]
        await engine.start_generate(start(PROMPT, "r", max_tokens=4))
        await engine.flush()
        assert not go_on.is_set()
        go_on.set()
        await engine.flush()
        assert engine.loop.alive
