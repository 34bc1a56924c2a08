"""Strategies that break the rules: each harms only its own request, and the error names it."""

from __future__ import annotations

import asyncio
import gc
import json
from collections import Counter
from contextlib import suppress

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.protocol import NoCapacity, PeerUnreachable
from router import Chunk, strategy
from router.base import StrategyError

PROMPT = list(range(1, 41))
ASK = {"prompt": PROMPT, "max_tokens": 5, "temperature": 0, "return_token_ids": True}
TOKENS = [140, 141, 142, 143, 144]
QUICK = {"grace_s": 0.1, "stall_s": 0.1}
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(autouse=True)
def _no_strategy_outlives_its_test():
    """Finalise generators that refuse to end here, not in the middle of another test.

    Their errors are printed with their lines, which Python 3.11 parses. In a test that is parsing
    itself, that ends with "AST constructor recursion depth mismatch".
    """
    gc.freeze()  # what is older is not looked at
    yield
    gc.collect()
    gc.unfreeze()


async def swallows_and_waits(request, cluster):
    """Swallow the cancellation inside a lease, so that a leak would show."""
    engine = cluster.decode.round_robin()
    async with engine.prep_recv(request, end=10):
        yield Chunk(token_ids=[1], text="x")
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                continue


async def swallows_everything(request, cluster):
    engine = cluster.decode.round_robin()
    async with engine.prep_recv(request, end=10):
        yield Chunk(token_ids=[1], text="x")
        for _ in range(100):  # not `while True`: the interpreter must be able to end it
            try:  # noqa: SIM105
                await asyncio.Event().wait()
            except BaseException:  # noqa: BLE001
                pass


async def yields_after_cancellation(request, cluster):
    engine = cluster.decode.round_robin()
    async with engine.prep_recv(request, end=10):
        while True:
            try:
                yield Chunk(token_ids=[1], text="x")
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                continue


async def returns_after_cancellation(request, cluster):
    engine = cluster.decode.round_robin()
    async with engine.prep_recv(request, end=10):
        yield Chunk(token_ids=[1], text="x")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return


async def child_swallows(request, cluster):
    async def stubborn():
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                continue

    engine = cluster.decode.round_robin()
    async with engine.prep_recv(request, end=10):
        yield Chunk(token_ids=[1], text="x")
        await asyncio.create_task(stubborn())


@pytest.mark.parametrize(
    "function",
    [swallows_and_waits, swallows_everything, yields_after_cancellation,
     returns_after_cancellation, child_swallows],
    ids=lambda f: f.__name__,
)  # fmt: skip
@pytest.mark.slow
async def test_cancellation_always_wins(route, fake, function):
    """When the client disconnects, no lease or task remains, whatever the strategy does."""
    a, b = fake("a"), fake("b", role="decode")
    async with route(a, b, **QUICK) as r:
        r.use(strategy(function))
        generation = r.server.router.revisions.active
        url = r.server.url + "/v1/completions"
        async with r.http.post(url, json={**ASK, "stream": True}) as response:
            await response.content.readany()
            assert b.leases
            response.close()
        await b.until(lambda: not b.leases)
        await r.settled()
        assert set(generation.violations) & {"ignored_cancellation", "left_tasks"}
        r.use(r.server.router.catalog["data_parallel"])
        assert (await r.post("/v1/completions", ASK))[0] == 200


async def catches_generator_exit(request, cluster):
    engine = cluster.decode.round_robin()
    async with engine.prep_recv(request, end=10):
        try:
            yield "no chunk"
        except GeneratorExit:
            yield Chunk(token_ids=[1], text="x")


async def hangs_in_its_cleanup(request, cluster):
    engine = cluster.decode.round_robin()
    async with engine.prep_recv(request, end=10):
        try:
            yield "no chunk"
        finally:
            await asyncio.Event().wait()


async def fails_in_its_cleanup(request, cluster):
    engine = cluster.decode.round_robin()
    async with engine.prep_recv(request, end=10):
        try:
            yield "no chunk"
        finally:
            raise KeyError("cleanup")


@pytest.mark.parametrize(
    "function",
    [catches_generator_exit, hangs_in_its_cleanup, fails_in_its_cleanup],
    ids=lambda f: f.__name__,
)
async def test_misbehaviour_at_the_end_leaks_no_lease(route, fake, function):
    a, b = fake("a"), fake("b", role="decode")
    async with route(a, b, **QUICK) as r:
        r.use(strategy(function))
        generation = r.server.router.revisions.active
        status, body = await r.post("/v1/completions", ASK)
        assert (status, body["error"]["type"]) == (500, "strategy_error")
        assert generation.label in body["error"]["message"]
        assert generation.violations["no_chunk"] == 1
        assert b.named("prep_recv")
        await b.until(lambda: not b.leases)
        await r.settled()


async def test_an_error_names_strategy_generation_and_line(route, fake, caplog):
    async def careless(request, cluster):
        yield Chunk(token_ids=[1 // len(request.output)])

    async with route(fake("a")) as r:
        r.use(strategy(careless))
        status, body = await r.post("/v1/completions", ASK)
        text = await (await r.http.get(r.server.url + "/metrics")).text()
        listed = (await r.get("/admin/strategies"))["active"]
    line = careless.__code__.co_firstlineno + 1
    where = f"test_misbehaviour.py:{line}"
    assert status == 500
    told = "strategy careless (generation 2): ZeroDivisionError: integer division or modulo by zero"
    assert body["error"]["message"] == f"{told} ({where})"
    assert where in caplog.text
    assert "careless (generation 2)" in caplog.text
    assert listed["offences"] == {"raised": 1}
    (violation,) = [
        (sample.labels, sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.endswith("strategy_offences_total")
    ]
    assert violation == ({"strategy": "careless", "generation": "2", "kind": "raised"}, 1.0)


@pytest.mark.parametrize("kind", [ValueError, StrategyError])
@pytest.mark.parametrize("text", ["half a pair: \ud800", "long" * 100_000])
async def test_an_error_with_any_text_is_told_everywhere(route, fake, kind, text):
    """Receipts, time lines and events have it, as JSON: it fails no call but its own."""

    async def careless(request, cluster):
        raise kind(text)
        yield

    async with route(fake("a")) as r, r.http.get(r.server.url + "/admin/events") as events:
        await events.content.readline()  # the listener is ready
        r.use(strategy(careless))
        status, body = await r.post("/v1/completions", ASK, headers={"X-Request-Id": "it"})
        assert (status, body["error"]["type"]) == (500, "strategy_error")
        assert text[:12] in body["error"]["message"] and len(body["error"]["message"]) <= 2000
        receipt = await r.get("/admin/requests/it")
        assert receipt["status"] == "failed" and len(receipt["error"]["message"]) < 2200
        assert (await r.get("/admin/trace"))["otherData"]["requests"] == 1
        async with asyncio.timeout(10):
            while b"event: request_ended" not in await events.content.readline():
                pass


async def test_an_error_that_the_router_may_retry_is_as_short(route, fake):
    """Also in the list of retries, and in its other fields."""

    async def careless(request, cluster):
        raise PeerUnreachable("long" * 100_000, param="p" * 1000, code="c" * 1000)
        yield

    async with route(fake("a")) as r:
        r.use(strategy(careless))
        _, body = await r.post("/v1/completions", ASK, headers={"X-Request-Id": "it"})
        assert len(json.dumps(body)) < 2800 and body["error"]["message"].startswith("longlong")
        receipt = await r.get("/admin/requests/it")
        assert receipt["retries"] and len(json.dumps(receipt["retries"][0])) < 2800


async def test_a_strategy_without_progress_ends_and_says_where_it_waits(route, fake):
    async def waits(request, cluster):
        engine = cluster.decode.round_robin()
        async with engine.prep_recv(request, end=10):
            await asyncio.Event().wait()
            yield Chunk()

    a, b = fake("a"), fake("b", role="decode")
    async with route(a, b, **QUICK) as r:
        r.use(strategy(waits))
        status, body = await r.post("/v1/completions", ASK)
        assert (status, body["error"]["type"]) == (504, "strategy_stalled")
        assert "waits (generation 2)" in body["error"]["message"]
        assert b.named("prep_recv")
        assert not b.leases
        (kind,) = r.server.router.revisions.active.violations
        assert kind == "stalled"
        await r.settled()


async def test_a_slow_engine_is_no_stall(route, fake):
    a = fake("a", gate=asyncio.Event())
    async with route(a, **QUICK) as r:
        ask = asyncio.create_task(r.post("/v1/completions", ASK))
        await a.until(lambda: a.running == 1)
        generation = r.server.router.revisions.active
        with suppress(TimeoutError):  # several stall checks happen meanwhile
            async with asyncio.timeout(4 * QUICK["stall_s"]):
                await asyncio.Event().wait()
        a.gate.set()
        assert (await ask)[0] == 200
        assert not generation.violations


async def test_leftover_tasks_end_with_the_request(route, fake):
    ended = asyncio.Event()

    async def lingers():
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    @strategy
    async def leaves(request, cluster):
        leaves.task = asyncio.create_task(lingers())
        async for chunk in cluster.engines.round_robin().start_generate(request):
            yield chunk

    async with route(fake("a"), **QUICK) as r:
        r.use(leaves)
        status, body = await r.post("/v1/completions", ASK)
        assert (status, body["choices"][0]["token_ids"]) == (200, TOKENS)
        assert ended.is_set()
        assert leaves.task.cancelled()
        assert r.server.router.revisions.active.violations == Counter({"left_tasks": 1})


async def test_a_task_that_raises_system_exit_does_not_end_the_router(route, fake):
    async def leave():
        raise SystemExit(3)

    @strategy
    async def exits(request, cluster):
        await asyncio.create_task(leave())
        yield Chunk()

    async with route(fake("a")) as r:
        r.use(exits)
        status, body = await r.post("/v1/completions", ASK)
        assert (status, body["error"]["type"]) == (500, "strategy_error")
        assert "SystemExit" in body["error"]["message"]


@pytest.mark.parametrize("raised", [GeneratorExit, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("in_a_task", [False, True])
async def test_exceptions_that_end_programs_end_only_the_request(route, fake, raised, in_a_task):
    async def leave():
        raise raised

    @strategy
    async def leaves(request, cluster):
        await (asyncio.create_task(leave()) if in_a_task else leave())
        yield Chunk()

    async with route(fake("a")) as r:
        r.use(leaves)
        for _ in range(2):
            status, body = await r.post("/v1/completions", ASK)
            assert (status, body["error"]["type"]) == (500, "strategy_error")
            assert raised.__name__ in body["error"]["message"]
        assert r.server.router.revisions.active.violations["raised"] == 2


async def test_a_strategy_may_cancel_its_own_work(route, fake):
    """A strategy that cancels its own work does not cancel the request."""
    a, b = fake("a"), fake("b")
    a.refuse["remote_send"] = [NoCapacity("full")] * 9

    @strategy
    async def resilient(request, cluster):
        try:
            async with asyncio.timeout(0.01):
                await asyncio.Event().wait()
        except TimeoutError:
            pass
        engines = sorted(cluster.engines, key=lambda engine: engine.id)
        try:
            async with engines[1].prep_recv(request, end=20) as kv, asyncio.TaskGroup() as legs:
                legs.create_task(engines[0].remote_send(request, kv, begin=0, end=10))
                legs.create_task(asyncio.Event().wait())
        except* NoCapacity:
            pass
        async for chunk in engines[1].start_generate(request):
            yield chunk

    async with route(a, b) as r:
        r.use(resilient)
        status, body = await r.post("/v1/completions", ASK)
        assert (status, body["choices"][0]["token_ids"]) == (200, TOKENS)
        assert not r.server.router.revisions.active.violations
        await r.settled()


async def test_an_engine_error_after_the_last_token_does_not_fail_the_request(route, fake):
    a, b = fake("a"), fake("b", role="decode")

    @strategy
    async def afterwards(request, cluster):
        engine = cluster.decode.round_robin()
        async for chunk in engine.start_generate(request):
            yield chunk
        await engine.prep_recv(request, end=10).__aenter__()

    b.refuse["prep_recv"] = [NoCapacity("full")]
    async with route(a, b) as r:
        r.use(afterwards)
        events = await r.events("/v1/completions", ASK, headers={"X-Request-Id": "x"})
        assert events[-1] == "[DONE]"
        assert len([e for e in events[:-1] if e["choices"][0]["finish_reason"]]) == 1
        receipt = await r.receipt("x")
        assert (receipt["status"], receipt["legs"][-1]["error"]["type"]) == ("done", "no_capacity")


async def test_a_choice_without_progress_beside_a_busy_one_ends(route, fake):
    """An engine works for the other prompt all the time."""

    @strategy
    async def waits(request, cluster):
        if request.prompt == [2]:
            await asyncio.Event().wait()
        async for chunk in cluster.engines.round_robin().start_generate(request):
            yield chunk

    a = fake("a", gate=asyncio.Event())
    async with route(a, **QUICK, request_timeout_s=5.0) as r:
        r.use(waits)
        status, body = await r.post("/v1/completions", {**ASK, "prompt": [[1], [2]]})
        assert (status, body["error"]["type"]) == (504, "strategy_stalled")
        assert [body["prompt"] for body in a.named("start_generate")] == [[1]]
        await a.until(lambda: a.running == 0)
        await r.settled()
