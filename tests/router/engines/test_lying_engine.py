"""Engines that break the protocol: the router survives, and the requests succeed elsewhere."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from engine_process import EngineProcess
from lying_engine import ENDLESS, FLOODS, FRAMES, OTHERS, REPLIES, LyingEngine
from router_process import RouterProcess
from waiting import until

pytestmark = pytest.mark.slow  # all of them: each waits a little

PROMPT = list(range(1, 41))
ASK = {"prompt": PROMPT, "max_tokens": 5, "temperature": 0, "return_token_ids": True}
TOKENS = [140, 141, 142, 143, 144]
# Lies about a call or its tokens, told by an engine that is up.
ABOUT_REQUESTS = [
    *FRAMES, *FLOODS, *REPLIES, "endless_error", "silent", "silent_call", "dribble", "runs_on",
    "unasked",
]  # fmt: skip
# Lies that keep an engine from being up, with a part of the reason.
ABOUT_HEALTH = {
    **{lie: "more than" for lie in ENDLESS if ENDLESS[lie][0] == "/health"},
    "endless_small_chunks": "more than", "endless_state": "more than", "endless_model": "more than",
    "absurd_state": "EngineState",
}  # fmt: skip


@asynccontextmanager
async def beside_a_liar(route: Any, fake: Any, lie: str, **config: Any) -> AsyncIterator[Any]:
    """Yield a router with a lying engine, which comes first, and an honest one; and both."""
    honest = fake("honest")
    liar = LyingEngine(lie, model=honest.info.model_dump())
    async with liar.serving(), route(honest, **config) as r:
        await r.post("/admin/engines", {"url": liar.url, "id": "liar"})
        backend = next(b for b in r.server.router.registry if b.url == liar.url)
        await backend.settled.wait()
        yield r, backend, honest


@pytest.mark.parametrize("lie", ABOUT_REQUESTS)
async def test_requests_of_a_lying_engine_succeed_elsewhere(route, fake, lie):
    async with beside_a_liar(route, fake, lie, engine_silence_s=0.2) as (r, liar, _):
        assert liar.status == "up", liar.describe()
        ask = {**ASK, "logprobs": 1} if lie == "odd_logprobs" else ASK
        for number in range(2):  # the engines take turns
            status, body = await r.post(
                "/v1/completions", ask, headers={"X-Request-Id": f"{number}"}
            )
            assert (status, body["choices"][0]["token_ids"]) == (200, TOKENS), body
        receipts = [await r.receipt(str(number)) for number in range(2)]
        retries = [retry for receipt in receipts for retry in receipt["retries"]]
        if lie != "unasked":  # this one only closes a connection
            assert [retry["engines"] for retry in retries] == [["liar"]], retries
        await r.settled()


@pytest.mark.parametrize("lie", ABOUT_HEALTH)
async def test_an_engine_that_lies_about_its_health_is_down(route, fake, lie):
    async with beside_a_liar(route, fake, lie, health_timeout_s=0.3) as (r, liar, _):
        assert liar.status == "down"
        assert ABOUT_HEALTH[lie] in liar.last_error, liar.last_error
        assert (await r.post("/v1/completions", ASK))[0] == 200
        assert (await r.get("/admin/engines"))["engines"]
        async with r.http.get(r.server.url + "/metrics") as reply:
            assert reply.status == 200


@pytest.mark.parametrize("lie", ["wrong_lease", "negative_send"])
async def test_a_strategy_is_not_blamed_for_a_lying_engine(route, fake, lie):
    async with beside_a_liar(route, fake, lie) as (r, liar, _):
        roles = ("decode", "prefill") if lie == "wrong_lease" else ("prefill", "decode")
        liar.role, r.server.router.registry["honest"].role = roles
        liar.role_pinned = r.server.router.registry["honest"].role_pinned = True
        await r.http.put(r.server.url + "/admin/strategy", json={"name": "prefill_decode"})
        status, body = await r.post("/v1/completions", ASK, headers={"X-Request-Id": "x"})
        assert (status, body["choices"][0]["token_ids"]) == (200, TOKENS), body
        (retry,) = (await r.receipt("x"))["retries"]
        assert (retry["error"]["type"], retry["engines"]) == ("internal", ["liar"])


@pytest.mark.parametrize("tells", [{"match_len": 40}, {"end": 38}, {"lease_id": 7}])
async def test_a_lease_that_the_router_refuses_is_released(route, fake, tells):
    """The engine has made it, and would hold its pages until it expires."""
    prefill, decode = fake("p", role="prefill"), fake("d", role="decode", prep_tells=tells)
    async with route(prefill, decode, attempts=1) as r:
        await r.http.put(r.server.url + "/admin/strategy", json={"name": "prefill_decode"})
        status, body = await r.post("/v1/completions", ASK)
        assert (status, body["error"]["type"]) == (500, "internal"), body
        await decode.until(lambda: not decode.leases)
        assert [name for name, _ in decode.calls] == ["prep_recv", "release"]
        assert r.server.router.registry["d"].status == "up"


@pytest.mark.parametrize("lie", ["retry_nan", "retry_inf", "retry_negative", "retry_zero"])
async def test_a_strange_retry_after_is_a_429(route, fake, lie):
    async with beside_a_liar(route, fake, lie, queue_timeout_s=0.3) as (r, _, _):
        r.server.router.registry.drain(r.server.router.registry["honest"], True)
        async with r.http.post(r.server.url + "/v1/completions", json=ASK) as reply:
            assert reply.status == 429
            assert 1 <= int(reply.headers["Retry-After"]) <= 600


async def test_an_engine_that_always_asks_to_retry_at_once_is_asked_less_and_less(route, fake):
    honest = fake("honest")
    liar = LyingEngine("retry_zero", model=honest.info.model_dump())
    async with liar.serving(), route(queue_timeout_s=0.5) as r:
        await r.post("/admin/engines", {"url": liar.url})
        await until(lambda: any(backend.usable for backend in r.server.router.registry))
        assert (await r.post("/v1/completions", ASK))[0] == 429
        assert 3 <= liar.calls.count("start_generate") <= 10


async def test_a_broken_tokenizer_is_read_once(route):
    liar = LyingEngine("broken_tokenizer")
    async with liar.serving(), route() as r:
        await r.post("/admin/engines", {"url": liar.url})
        await until(lambda: liar.calls.count("state") > 5)
        (engine,) = (await r.get("/admin/engines"))["engines"]
        assert engine["status"] == "down" and "tokenizer" in engine["last_error"]
        assert liar.calls.count("model") == 1


@pytest.mark.parametrize("lie", ["endless_prefixes", "endless_changes"])
async def test_prefixes_without_end_leave_the_cache_unknown(route, fake, lie):
    async with beside_a_liar(route, fake, lie) as (r, liar, _):
        await r.http.put(r.server.url + "/admin/strategy", json={"name": "cache_aware"})
        for _ in range(4):
            await r.post("/v1/completions", {**ASK, "timeout": 2})
        prefixes = r.server.router.registry.prefixes
        await until(lambda: not prefixes._views[liar].ready.is_set())
        assert not prefixes._views[liar].known


async def test_silence_of_an_engine_that_reports_work_counts_less(route, fake):
    """A request that waits on a busy engine is silent too."""
    gate = asyncio.Event()

    class Busy(fake):
        async def state(self, http):
            reply = await super().state(http)
            reply.text = reply.text.replace('"waiting": 0', '"waiting": 7')
            return reply

    busy = Busy("busy", gate=gate)
    async with route(busy, engine_silence_s=0.3) as r:
        backend = r.server.router.registry["busy"]
        await until(lambda: backend.state.waiting == 7)
        ask = asyncio.create_task(r.post("/v1/completions", ASK))
        await busy.until(lambda: busy.running == 1)
        await until(lambda: backend._streams)
        (stream,) = backend._streams
        await until(lambda: backend._streams[stream].s > 0.02)  # 0.4 s of them
        assert not ask.done()
        gate.set()
        assert (await ask)[1]["choices"][0]["token_ids"] == TOKENS


class Liar:
    """`lying_engine.py` as a process."""

    def __init__(self, lie: str, like: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, Path(__file__).parents[2] / "lying_engine.py",
             "--lie", lie, "--like", like],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().split()[-1]


@contextmanager
def processes(lie: str) -> Iterator[tuple[RouterProcess, psutil.Process]]:
    engine = EngineProcess(model="mock")
    liar = Liar(lie, engine.url)
    router = RouterProcess([engine.url, liar.url], "data_parallel", "--engine-silence", "1")
    try:
        yield router, psutil.Process(router.pid)
    finally:
        router.kill()
        liar.process.kill()
        liar.process.wait()
        engine.kill()


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    ("lie", "room"),
    [("endless_health", 40), pytest.param("endless_line", 120, marks=pytest.mark.thorough)],
)
def test_a_lying_engine_takes_no_memory_and_harms_no_other_engines_requests(lie: str, room: int):
    """`room`: MiB that the router may grow by; one frame has up to 16, and exists twice."""
    with processes(lie) as (router, memory):
        wanted = router.tokens(PROMPT)
        before = most = memory.memory_info().rss
        give_up = time.monotonic() + 4
        while time.monotonic() < give_up:
            assert router.tokens(PROMPT) == wanted
            most = max(most, memory.memory_info().rss)
        assert most - before < room << 20, f"{(most - before) / 2**20:.0f} MiB"


def test_every_lie_is_told():
    extra = {
        "wrong_lease",
        "negative_send",
        "endless_prefixes",
        "endless_changes",
        "broken_tokenizer",
    }
    tested = {*ABOUT_REQUESTS, *ABOUT_HEALTH, *extra}
    assert {*ENDLESS, *FRAMES, *FLOODS, *REPLIES, *OTHERS} <= tested
