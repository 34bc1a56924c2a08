"""Real engine processes that die or hang, behind a router with its default settings."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import httpx
import pytest
from engine_process import EngineProcess
from forked import ForkedProcess, run_microserve

from router.base.config import RouterConfig

pytestmark = pytest.mark.processes

ASK = {"prompt": [1, 2, 3], "max_tokens": 200, "ignore_eos": True, "return_token_ids": True}
FLAGS = ("--step-ms", "10", "--prefill-tokens-per-ms", "0")
DEFAULTS = {
    name: getattr(RouterConfig(), name) for name in ("health_interval_s", "health_timeout_s")
}


@pytest.fixture
def mocks() -> Iterator[list[EngineProcess]]:
    engines = [EngineProcess(*FLAGS, "--engine-id", f"m{n}", model="mock") for n in range(2)]
    yield engines
    for engine in engines:
        engine.kill()


def tokens_of(events):
    return [t for e in events if e != "[DONE]" for c in e["choices"] for t in c["token_ids"]]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
async def test_an_engine_that_dies_or_hangs_is_noticed(mocks, routed_to, number):
    """Each engine has two streams when the signal comes; every request completes.

    A death is noticed by its connections, so long before the time of a silent engine is over.
    """
    config = DEFAULTS | ({"health_timeout_s": 120.0} if number == signal.SIGKILL else {})
    async with routed_to([engine.url for engine in mocks], **config) as r:
        registry = r.server.router.registry
        whole = tokens_of(await r.events("/v1/completions", ASK))
        assert len(whole) == ASK["max_tokens"]
        asking = [asyncio.create_task(r.events("/v1/completions", ASK)) for _ in range(4)]
        async with asyncio.timeout(10):
            while not all(backend.load.streams == 2 for backend in registry):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        mocks[0].signal(number)
        async with asyncio.timeout(20):
            while registry["m0"].status != "down":  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        for ask in asking:
            assert tokens_of(await ask) == whole
        await r.settled()
        if number == signal.SIGSTOP:
            mocks[0].signal(signal.SIGCONT)
            async with asyncio.timeout(30):
                while not registry["m0"].usable:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)


@pytest.mark.slow
async def test_an_engine_in_a_long_step_is_not_taken_for_hung(routed_to):
    """A step of three seconds, longer than an engine may be silent."""
    engine = EngineProcess("--step-ms", "3000", model="mock")
    try:
        async with routed_to([engine.url], **DEFAULTS) as r:
            (backend,) = r.server.router.registry
            headers = {"X-Request-Id": "x"}
            ask = asyncio.create_task(
                r.post("/v1/completions", {**ASK, "max_tokens": 1}, headers=headers)
            )
            seen = set()
            while not ask.done():
                seen.add(backend.status)
                await asyncio.sleep(0.01)
            assert (await ask)[0] == 200
            assert seen == {"up"}
            receipt = await r.receipt("x")
            assert receipt["retries"] == [] and receipt["ms"] > 2500
    finally:
        engine.kill()


@pytest.mark.slow
def test_a_stopping_router_finishes_its_requests():
    engine = EngineProcess("--step-ms", "30", model="mock")  # so that the stream lasts
    router = ForkedProcess(
        run_microserve, "router", "--port", "0", "--engine", engine.url, "--shutdown", "20",
        "--parent-pid", str(os.getpid()),  # which has made the dry run, as `up` does
    )  # fmt: skip
    try:
        url = router.line().split()[-1]
        body = {**ASK, "stream": True, "max_tokens": 150}
        with httpx.Client(base_url=url, timeout=20, verify=False) as client:
            with client.stream("POST", "/v1/completions", json=body) as reply:
                lines = (line for line in reply.iter_lines() if line)
                read = [next(lines)]
                router.signal(signal.SIGTERM)
                while httpx.get(f"{url}/health", verify=False).status_code != 503:
                    pass
                refused = client.post("/v1/completions", json=ASK)
                assert refused.status_code == 503
                assert refused.headers["Connection"] == "close"
                read += lines
            assert read[-1] == "data: [DONE]"
        assert router.wait() == 0
        engine.at_rest()
    finally:
        router.kill()
        engine.kill()
