"""A fleet of scripted engines: health, breakers, draining, priorities, the engines file."""

from __future__ import annotations

import asyncio
import time

import pytest
from waiting import until

from engine.protocol import Internal, NoCapacity

pytestmark = pytest.mark.slow  # all of them: each waits a little

ASK = {"prompt": list(range(1, 41)), "max_tokens": 5, "temperature": 0, "return_token_ids": True}
TOKENS = [140, 141, 142, 143, 144]


def tokens_of(events):
    return [t for e in events if e != "[DONE]" for c in e["choices"] for t in c["token_ids"]]


async def change(r, id, **fields):
    async with r.http.patch(f"{r.server.url}/admin/engines/{id}", json=fields) as response:
        return response.status, await response.json()


async def remove(r, id):
    async with r.http.delete(f"{r.server.url}/admin/engines/{id}") as response:
        return await response.json()


@pytest.mark.parametrize("end", ["drain", "remove"])
async def test_draining_or_removing_an_engine_moves_its_requests(route, fake, end):
    a, b = fake("a", gate=asyncio.Event()), fake("b")
    async with route(a, b, attempts=1) as r:  # a move is no failed attempt
        ask = asyncio.create_task(r.events("/v1/completions", ASK, headers={"X-Request-Id": "x"}))
        await a.until(lambda: a.running == 1)
        if end == "drain":
            _, described = await change(r, "a", draining=True)
            assert (described["moved"], described["draining"]) == (1, True)
        else:
            assert (await remove(r, "a"))["moved"] == 1
        assert tokens_of(await ask) == TOKENS
        assert b.named("start_generate")[-1]["output"] == TOKENS[:1]
        assert a.named("release")
        receipt = await r.receipt("x")
        assert receipt["status"] == "done"
        assert receipt["retries"][0]["error"]["type"] == "draining"
        if end == "remove":
            await until(lambda: [backend.id for backend in r.server.router.registry] == ["b"])
        await r.settled()


async def test_a_drained_last_engine_keeps_its_requests(route, fake):
    gate = asyncio.Event()
    a = fake("a", gate=gate)
    async with route(a) as r:
        ask = asyncio.create_task(r.events("/v1/completions", ASK))
        await a.until(lambda: a.running == 1)
        assert (await remove(r, "a"))["moved"] == 0
        assert (await r.post("/v1/completions", ASK))[0] == 503
        (engine,) = (await r.get("/admin/engines"))["engines"]
        assert (engine["leaving"], engine["load"]["streams"]) == (True, 1)
        gate.set()
        assert tokens_of(await ask) == TOKENS
        await until(lambda: not list(r.server.router.registry))


async def test_roles_and_labels(route, fake):
    async with route(fake("a")) as r:
        assert (await change(r, "a", role="prefill", labels={"zone": "1"}))[0] == 200
        engine = await r.get("/admin/engines/a")
        assert (engine["role"], engine["labels"]) == ("prefill", {"zone": "1"})
        assert (engine["source"], engine["breaker"]) == ("flag", "closed")
        for bad in ({"role": "cook"}, {"labels": {"a": 1}}, {"labels": 3}, {"colour": "red"}):
            assert (await change(r, "a", **bad))[0] == 400
        assert (await change(r, "nobody", role="any"))[0] == 404


async def test_a_failing_engine_is_avoided_and_tried_again(route, fake):
    a, b = fake("a", refuse={"start_generate": [Internal("boom")] * 3}), fake("b")
    async with route(a, b, breaker_failures=3, breaker_open_s=30) as r:
        backend = r.server.router.registry["a"]
        while backend.breaker.state == "closed":
            assert (await r.post("/v1/completions", ASK))[0] == 200
        assert len(a.named("start_generate")) == 3
        async with r.http.get(r.server.url + "/metrics") as response:
            text = await response.text()
        assert 'microserve_router_breaker_state{engine="a"} 2.0' in text
        assert 'microserve_router_breaker_opened_total{engine="a"} 1.0' in text
        for _ in range(4):
            await r.post("/v1/completions", ASK)
        assert len(a.named("start_generate")) == 3
        clock = backend.breaker._clock
        backend.breaker._clock = lambda: clock() + 30
        assert backend.breaker.state == "half_open"
        while backend.breaker.state != "closed":
            assert (await r.post("/v1/completions", ASK))[0] == 200
        assert len(a.named("start_generate")) == 4


async def test_no_capacity_opens_no_breaker(route, fake):
    full = [NoCapacity("full", retry_after_s=0.001)] * 5
    a = fake("a", refuse={"start_generate": full})
    async with route(a, breaker_failures=3) as r:
        assert (await r.post("/v1/completions", ASK))[0] == 200
        assert r.server.router.registry["a"].breaker.opened == 0


async def test_open_breakers_leave_no_request_without_an_engine(route, fake):
    a = fake("a", refuse={"start_generate": [Internal("boom")] * 2})
    async with route(a, breaker_failures=1, breaker_open_s=60, attempts=2) as r:
        assert (await r.post("/v1/completions", ASK))[0] == 500
        assert r.server.router.registry["a"].breaker.state == "open"
        assert (await r.post("/v1/completions", ASK))[0] == 200


async def test_retries_have_a_budget_but_a_lost_engine_is_extra(route, fake):
    boom = [Internal("boom")] * 100
    a, b = fake("a", refuse={"start_generate": [*boom]}), fake("b")
    b.refuse = a.refuse
    async with route(a, b, retry_share=0.0, breaker_failures=1000, attempts=2) as r:
        retries = r.server.router.execution.retries
        with retries.request() as _:
            retries.retrying = 10  # the reserve is in use
            assert (await r.post("/v1/completions", ASK, headers={"X-Request-Id": "x"}))[0] == 500
            assert (await r.receipt("x"))["fallbacks"] == ["retry_denied"]
            assert len(boom) - len(a.refuse["start_generate"]) == 1
            a.refuse["start_generate"].clear()
            a.break_after = b.break_after = [2]
            assert tokens_of(await r.events("/v1/completions", ASK)) == TOKENS


async def test_without_live_engines_requests_are_503_until_one_is_back(route, fake):
    async with route() as r:
        async with fake("a").serving() as a:
            await r.post("/admin/engines", {"url": a.url})
            (backend,) = r.server.router.registry
            await until(lambda: backend.usable)
            assert (await r.post("/v1/completions", ASK))[0] == 200
        async with asyncio.timeout(10):
            status, body = await r.post("/v1/completions", ASK)
        assert (status, body["error"]["type"]) == (503, "no_engines")
        async with fake("a", epoch=2).serving(int(a.url.rpartition(":")[2])):
            await until(lambda: backend.usable)
            assert (await r.post("/v1/completions", ASK))[0] == 200


async def test_engines_follow_the_engines_file(route, fake, tmp_path, caplog):
    a, b = fake("a"), fake("b", gate=asyncio.Event())
    path = tmp_path / "engines"
    async with a.serving(), b.serving():
        path.write_text(f"{a.url} role=prefill zone=x\n{b.url}\n")
        async with route(engines_file=str(path), watch_s=0.002) as r:
            registry = r.server.router.registry
            assert {(m.id, m.role, m.source) for m in registry} == {
                ("a", "prefill", "file"), ("b", "any", "file"),
            }  # fmt: skip
            path.write_text("nonsense\n")
            await until(lambda: "stays in force" in caplog.text)
            assert {backend.id for backend in registry} == {"a", "b"}
            asking = [asyncio.create_task(r.events("/v1/completions", ASK)) for _ in range(2)]
            await b.until(lambda: b.running >= 1)
            path.write_text(f"{a.url}\n")
            for ask in asking:
                assert tokens_of(await ask) == TOKENS  # b's request has moved to a
            await until(lambda: [backend.id for backend in registry] == ["a"])
            path.write_text(f"{a.url}\n{b.url}\n")
            await until(lambda: {m.id for m in registry if m.usable} == {"a", "b"})


async def test_a_self_registered_engine_is_forgotten_when_it_is_gone(route, fake):
    a = fake("a")
    async with route(forget_s=0.1) as r:
        registry = r.server.router.registry
        async with a.serving():
            for _ in range(2):
                body = {"url": a.url, "id": "a", "heartbeat": True, "labels": {"zone": "1"}}
                assert (await r.post("/admin/engines", body))[0] == 200
            await until(lambda: registry["a"].usable)
            assert registry["a"].describe()["labels"] == {"zone": "1"}
        await until(lambda: not list(registry))


async def test_priorities(route, fake):
    """Three requests wait for room; the most urgent is served first."""
    a = fake("a", gate=asyncio.Event())
    a.refuse["start_generate"] = [NoCapacity("full", retry_after_s=1000)] * 3
    async with route(a) as r:
        asks = []
        for name, how in (
            ("last", {}), ("second", {"headers": {"X-Priority": "-1"}}), ("first", {}),
        ):  # fmt: skip
            body = {**ASK, "priority": -2} if name == "first" else ASK
            headers = {"X-Request-Id": name, **how.get("headers", {})}
            asks.append(asyncio.create_task(r.post("/v1/completions", body, headers=headers)))
            await until(lambda: len(r.server.router.queue) == len(asks))
        a.refuse.clear()
        r.server.router.queue.freed()
        a.gate.set()
        for status, _ in await asyncio.gather(*asks):
            assert status == 200
        order = [h["x-request-id"] for h, (call, _) in zip(a.headers, a.calls, strict=True)
                 if call == "start_generate"]  # fmt: skip
        assert order[-3:] == ["first", "second", "last"]
        told = [body.get("priority", 0) for call, body in a.calls if call == "start_generate"]
        assert told[-3:] == [-2, -1, 0]  # for the engine's own queue
        await r.settled()


async def test_sends_have_the_priority_of_their_request(route, fake):
    p, d = fake("p", role="prefill"), fake("d", role="decode")
    async with route(p, d, strategy="prefill_decode") as r:
        assert (await r.post("/v1/completions", {**ASK, "priority": 7}))[0] == 200
        (send,), (start,) = p.named("remote_send"), d.named("start_generate")
        assert send["priority"] == start["priority"] == 7


async def test_a_disconnect_in_the_queue_leaves_no_trace(route, fake):
    a = fake("a", refuse={"start_generate": [NoCapacity("full", retry_after_s=1000)]})
    async with route(a) as r:
        ask = asyncio.create_task(r.post("/v1/completions", ASK, headers={"X-Request-Id": "x"}))
        await until(lambda: len(r.server.router.queue) == 1)
        ask.cancel()
        await until(lambda: not len(r.server.router.queue))
        await r.settled()
        assert (await r.receipt("x"))["status"] == "cancelled"


@pytest.mark.parametrize("header", ["high", "1.5", "", "+1", "1" * 10, "٣"])
async def test_a_priority_that_is_no_integer_is_refused(route, fake, header):
    async with route(fake("a")) as r:
        headers = {"X-Priority": header, "X-Request-Id": "x"}
        status, body = await r.post("/v1/completions", ASK, headers=headers)
        assert (status, body["error"]["param"]) == (400, "X-Priority")
        status, _ = await r.post("/v1/completions", {**ASK, "priority": 1}, headers=headers)
        assert status == 400
        assert r.idle()


async def test_time_in_which_the_router_does_not_run_is_no_silence_of_an_engine(
    route, fake, caplog
):
    """The loop stands still from a health check on, past its deadline by a little."""
    a = fake("a")
    checks, answer = 0, a.health

    async def health(http):
        nonlocal checks
        checks += 1
        if checks in (3, 6):
            time.sleep(1.0)  # noqa: ASYNC251  stands for a process that is stopped
        return await answer(http)

    a.health = health
    async with route(a, health_timeout_s=0.8) as r:
        (backend,) = r.server.router.registry
        await until(lambda: checks > 8)
        assert backend.status == "up"
        assert "is down" not in caplog.text
