"""Replicas by committed prefixes on real engines, one of which is killed."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from engine_process import EngineProcess

from engine.protocol import ALL_CAPABILITIES, ModelInfo
from router.engines.client import EngineClient

pytestmark = [pytest.mark.processes, pytest.mark.slow]

PROMPT = [(7 * i * i + 3 * i) % 500 + 1 for i in range(200)]
ASK = {
    "prompt": PROMPT, "max_tokens": 400, "return_token_ids": True, "ignore_eos": True,
    "temperature": 0, "stream": True,
}  # fmt: skip


@pytest.fixture
def engines() -> Iterator[dict[str, EngineProcess]]:
    started = {
        name: EngineProcess("--pool-pages", "1024", "--engine-id", name, secret="7a" * 32)
        for name in ("a", "b", "c")
    }
    yield started
    for engine in started.values():
        engine.kill()


@pytest.fixture(autouse=True)
def without_mirrors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the router believe that engines do not mirror, and that nothing resumes exactly."""
    model = EngineClient.model

    async def less(self: EngineClient) -> ModelInfo:
        can = [each for each in ALL_CAPABILITIES if each not in ("mirror", "resume", "fork")]
        return (await model(self)).model_copy(update={"capabilities": can})

    monkeypatch.setattr(EngineClient, "model", less)


async def test_a_killed_engines_request_goes_on_from_committed_pages(engines, routed_to):
    urls = [engine.url for engine in engines.values()]
    async with routed_to(urls, strategy="replicate", params={"every": 32}) as r:
        tokens: list[int] = []
        dead = ""
        headers = {"X-Request-Id": "x"}
        async with r.http.post(
            f"{r.server.url}/v1/completions", json=ASK, headers=headers
        ) as reply:
            async for line in reply.content:
                event = line.decode().strip().removeprefix("data: ")
                if event in ("", "[DONE]") or event.startswith(":"):
                    continue
                fields: Any = json.loads(event)
                assert "error" not in fields, fields
                tokens += [t for choice in fields["choices"] for t in choice["token_ids"]]
                (leg,) = [
                    leg
                    for leg in r.server.router.receipts["x"].legs[:1]
                    if leg.call == "start_generate"
                ]
                if not dead and (leg.landed or 0) > 256:
                    dead = leg.engine
                    engines[dead].signal(signal.SIGKILL)
        assert dead, "no copy was committed"
        receipt = await r.receipt("x")
        first, second = [leg for leg in receipt["legs"] if leg["call"] == "start_generate"]
        assert (first["engine"], second["engine"]) == (dead, first["replica"])
        assert second["begin"] >= first["landed"] > 256
        assert "mirrors_committed_prefixes" in receipt["fallbacks"]
        assert not {"recomputed", "inexact_resume"} & set(receipt["fallbacks"])
        body = {**ASK, "stream": False}
        status, whole = await r.post("/v1/completions", body)
        assert status == 200 and whole["choices"][0]["token_ids"] == tokens
        await r.settled()
        for name, engine in engines.items():
            if name != dead:
                await asyncio.to_thread(engine.at_rest)
