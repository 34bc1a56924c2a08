"""Retries, leases and cancellation, with scripted engines."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from engine.protocol import BadRequest, Internal, LeaseExpired, NoCapacity, PeerUnreachable
from router import Chunk, strategy

PROMPT = list(range(1, 41))
ASK = {"prompt": PROMPT, "max_tokens": 5, "temperature": 0, "return_token_ids": True}
TOKENS = [140, 141, 142, 143, 144]


def tokens_of(events):
    return [
        token for e in events if e != "[DONE]" for c in e["choices"] for token in c["token_ids"]
    ]


async def test_data_parallel_alternates_engines(route, fake):
    a, b = fake("a"), fake("b")
    async with route(a, b) as r:
        for _ in range(4):
            status, body = await r.post("/v1/completions", ASK)
            assert (status, body["choices"][0]["token_ids"]) == (200, TOKENS)
    assert len(a.named("start_generate")) == len(b.named("start_generate")) == 2
    assert all(body["begin"] == 0 for body in a.named("start_generate"))


async def test_prefill_decode_makes_three_calls_with_one_request_id(route, fake):
    p, d = fake("p", role="prefill"), fake("d", role="decode", match_len=16)
    async with route(p, d, strategy="prefill_decode") as r:
        events = await r.events("/v1/completions", ASK, headers={"X-Request-Id": "mine"})
        receipt = await r.receipt("mine")
        assert tokens_of(events) == TOKENS
        assert events[-1] == "[DONE]"
        await r.settled()
    (prep,), (send,), (start,) = (
        d.named("prep_recv"), p.named("remote_send"), d.named("start_generate")
    )  # fmt: skip
    assert prep["end"] == 39
    assert (send["begin"], send["end"], send["kv_addr"]) == (16, 39, "addr-d-1")
    assert (start["begin"], start["lease_id"]) == (39, "d-1")
    assert prep["request_id"] == send["request_id"] == start["request_id"]
    assert prep["request_id"] != "mine"
    assert {h["x-request-id"] for h in d.headers + p.headers} == {"mine"}
    assert not d.named("release") and not p.named("release")
    assert [(leg["call"], leg["engine"]) for leg in receipt["legs"]] == [
        ("prep_recv", "d"), ("remote_send", "p"), ("start_generate", "d"),
    ]  # fmt: skip
    assert receipt["legs"][1]["bytes"] == 4 * 23
    assert (
        receipt["cached_tokens"] == 16
    )  # tokens that another engine put are not counted as cached
    assert receipt["status"] == "done"


@pytest.mark.parametrize("name", ["prefill_decode", "balanced"])
async def test_with_one_engine_left_the_calls_collapse(route, fake, name):
    a = fake("a")
    async with route(a, strategy=name) as r:
        status, body = await r.post("/v1/completions", ASK, headers={"X-Request-Id": "x"})
        assert (status, body["choices"][0]["token_ids"]) == (200, TOKENS)
        assert (await r.receipt("x"))["legs"][0]["collapsed"]
    assert [call for call, _ in a.calls] == ["start_generate"]
    assert a.named("start_generate")[0]["begin"] == 0
    assert "lease_id" not in a.named("start_generate")[0]


@pytest.mark.parametrize("name", ["data_parallel", "prefill_decode"])
async def test_a_broken_stream_resumes_where_it_stopped(route, fake, name):
    a, b = fake("a", break_after=[3]), fake("b", break_after=[3])
    async with route(a, b, strategy=name) as r:
        events = await r.events("/v1/completions", ASK, headers={"X-Request-Id": "x"})
        receipt = await r.receipt("x")
        assert tokens_of(events) == TOKENS
        assert events[-1] == "[DONE]"
        assert receipt["retries"][0]["after_tokens"] == 3
    first, second = sorted(
        (body for e in (a, b) for body in e.named("start_generate")),
        key=lambda body: len(body.get("output", [])),
    )
    assert second["output"] == TOKENS[:3]
    assert second["prompt"] == PROMPT
    assert second["max_tokens"] == 5
    assert second["seed"] == first["seed"]
    assert second["request_id"] != first["request_id"]


async def test_a_lost_final_event_is_reconstructed(route, fake):
    a, b = fake("a"), fake("b")

    @strategy
    async def breaks(request, cluster):
        for number in range(5 - len(request.output)):
            token = 140 + len(request.output) + number
            yield Chunk(token_ids=[token], text=f"w{token} ")
        raise PeerUnreachable("gone")

    async with route(a, b) as r:
        r.use(breaks)
        _, body = await r.post("/v1/completions", ASK)
    assert body["choices"][0]["token_ids"] == TOKENS
    assert body["choices"][0]["finish_reason"] == "length"


async def test_attempts_are_bounded_and_the_failure_is_an_event(route, fake):
    a, b = fake("a", break_after=[1, 1, 1]), fake("b", break_after=[1, 1, 1])
    async with route(a, b) as r:
        events = await r.events("/v1/completions", ASK)
    assert tokens_of(events[:-1]) == TOKENS[:3]
    assert events[-1]["error"]["type"] == "peer_unreachable"


async def test_a_failure_before_the_first_token_has_a_status(route, fake):
    a = fake("a", refuse={"start_generate": [Internal("boom")] * 3})
    async with route(a) as r:
        status, body = await r.post("/v1/completions", {**ASK, "stream": True})
    assert (status, body["error"]["message"]) == (500, "boom")
    assert len(a.named("start_generate")) == 3


async def test_an_error_event_is_retried_elsewhere(route, fake):
    a, b = fake("a", error_after=[(2, Internal("step failed"))]), fake("b")
    async with route(a, b) as r:
        events = await r.events("/v1/completions", ASK)
    assert tokens_of(events) == TOKENS
    assert b.named("start_generate")[0]["output"] == TOKENS[:2]


async def test_client_errors_are_not_retried(route, fake):
    a, b = fake("a"), fake("b")
    a.refuse["start_generate"] = b.refuse["start_generate"] = [BadRequest("no", param="top_p")]
    async with route(a, b) as r:
        status, body = await r.post("/v1/completions", ASK)
    assert (status, body["error"]["param"]) == (400, "top_p")
    assert len(a.named("start_generate") + b.named("start_generate")) == 1


async def test_an_expired_lease_is_retried_and_is_no_client_error(route, fake):
    p, d = fake("p", role="prefill"), fake("d", role="decode")
    p.refuse["remote_send"] = [LeaseExpired("too late")]
    async with route(p, d, strategy="prefill_decode") as r:
        status, _ = await r.post("/v1/completions", ASK)
        assert status == 200
        p.refuse["remote_send"] = [LeaseExpired("too late")] * 3
        status, body = await r.post("/v1/completions", ASK)
        assert (status, body["error"]["code"]) == (500, "lease_expired")
    assert not d.leases


async def test_a_sender_whose_kv_never_arrives_is_avoided(route, fake):
    """It says that it has sent, and the receiver waits until its lease ends."""
    liar, p, d = fake("a", role="prefill"), fake("p", role="prefill"), fake("d", role="decode")
    d.refuse["start_generate"] = [LeaseExpired("nothing came")]
    async with route(liar, p, d, strategy="prefill_decode") as r:
        status, _ = await r.post("/v1/completions", ASK, headers={"X-Request-Id": "x"})
        assert status == 200
        receipt = await r.receipt("x")
        first, second = (leg["engine"] for leg in receipt["legs"] if leg["call"] == "remote_send")
        assert [retry["engines"] for retry in receipt["retries"]] == [[first]]
        assert first != second
        breaker = r.server.router.registry[first].breaker
        assert (breaker.state, breaker.opened) == ("open", 1)
        assert r.server.router.registry["d"].breaker.state == "closed"


@pytest.mark.slow
async def test_no_capacity_is_waited_for(route, fake):
    a = fake("a", refuse={"start_generate": [NoCapacity("full", retry_after_s=0.01)] * 5})
    async with route(a) as r:
        status, _ = await r.post("/v1/completions", ASK, headers={"X-Request-Id": "x"})
        assert status == 200
        assert (await r.receipt("x"))["waits"] == 5


async def test_no_capacity_for_too_long_is_429_with_retry_after(route, fake):
    a = fake("a", refuse={"start_generate": [NoCapacity("full", retry_after_s=7)] * 5})
    async with route(a, queue_timeout_s=0.05) as r:
        url = r.server.url + "/v1/completions"
        async with r.http.post(url, json=ASK) as response:
            assert response.status == 429
            assert response.headers["Retry-After"] == "7"
            assert (await response.json())["error"]["type"] == "rate_limit_error"
        await r.settled()


async def test_a_full_queue_is_429_at_once(route, fake):
    a = fake("a", refuse={"start_generate": [NoCapacity("full", retry_after_s=7)]})
    async with route(a, max_queue=0) as r:
        status, _ = await r.post("/v1/completions", ASK)
    assert status == 429


async def test_no_engines_is_503_at_once(route):
    async with route() as r:
        status, body = await r.post("/v1/completions", ASK)
    assert (status, body["error"]["type"]) == (503, "no_engines")


async def test_a_failed_send_releases_the_lease(route, fake):
    p, d = fake("p", role="prefill"), fake("d", role="decode")
    p.refuse["remote_send"] = [BadRequest("no")]
    async with route(p, d, strategy="prefill_decode") as r:
        status, _ = await r.post("/v1/completions", ASK)
        assert status == 400
        assert d.named("release") == [{"lease_id": "d-1"}]
        assert not d.leases
        await r.settled()


async def test_a_disconnect_during_a_send_ends_lease_and_send(route, fake):
    p, d = fake("p", role="prefill", send_gate=asyncio.Event()), fake("d", role="decode")
    async with route(p, d, strategy="prefill_decode") as r:
        ask = asyncio.create_task(r.post("/v1/completions", ASK, headers={"X-Request-Id": "x"}))
        await p.until(lambda: bool(p.named("remote_send")))
        ask.cancel()
        await d.until(lambda: bool(d.named("release")))
        await p.until(lambda: bool(p.named("release")))
        assert p.named("release") == [{"request_id": p.named("remote_send")[0]["request_id"]}]
        assert not d.leases
        await r.settled()
        receipt = await r.receipt("x")
        assert receipt["status"] == "cancelled"
        assert receipt["legs"][1]["error"]["type"] == "cancelled"


async def test_a_disconnect_in_mid_stream_ends_the_generation(route, fake):
    a = fake("a", gate=asyncio.Event())
    async with route(a) as r:
        url = r.server.url + "/v1/completions"
        async with r.http.post(url, json={**ASK, "stream": True}) as response:
            await response.content.readany()
            response.close()
        await a.until(lambda: bool(a.named("release")))
        assert a.named("release")[0]["request_id"] == a.named("start_generate")[0]["request_id"]
        await a.until(lambda: a.running == 0)
        await r.settled()


@pytest.mark.slow
async def test_the_streams_of_a_silent_engine_move_elsewhere(route, fake):
    gate = asyncio.Event()
    a, b = fake("a", gate=gate), fake("b")
    async with route(a, b, health_timeout_s=0.5) as r:  # a busy machine is silent for less
        ask = asyncio.create_task(r.events("/v1/completions", ASK))
        await a.until(lambda: a.running == 1)
        a.silent = True
        events = await ask
        assert tokens_of(events) == TOKENS
        engines = (await r.get("/admin/engines"))["engines"]
        assert [e["status"] for e in engines] == ["down", "up"]
        a.silent = False
        gate.set()
        backend = r.server.router.registry["a"]
        async with asyncio.timeout(30):
            while not backend.usable:
                backend.probe.set()
                await asyncio.sleep(0)


async def test_an_unreachable_receiver_is_blamed_not_the_sender(route, fake):
    p, d = fake("p", role="prefill"), fake("d", role="decode")
    p.refuse["remote_send"] = [PeerUnreachable("cannot reach d")]
    async with route(p, d, strategy="prefill_decode") as r:
        status, _ = await r.post("/v1/completions", ASK, headers={"X-Request-Id": "x"})
        assert status == 200
        assert (await r.receipt("x"))["retries"][0]["engines"] == ["d"]
    assert p.named("start_generate")[0]["begin"] == 0


async def test_a_receiver_that_goes_down_is_blamed_not_the_sender(route, fake):
    """The sender says nothing: the router notices the receiver's death in the middle of a send."""
    p, d = fake("p", role="prefill"), fake("d", role="decode")
    p.send_gate = asyncio.Event()
    async with route(p, d, strategy="prefill_decode", health_interval_s=60) as r:
        registry = r.server.router.registry
        asking = asyncio.create_task(r.post("/v1/completions", ASK, headers={"X-Request-Id": "x"}))
        await p.until(lambda: bool(p.named("remote_send")))
        registry["d"].go_down("killed")
        status, _ = await asking
        assert status == 200
        (retry,) = (await r.receipt("x"))["retries"]
        assert retry["engines"] == ["d"]
        assert (registry["p"].status, registry["p"].last_error) == ("up", "")


async def raises(request, cluster):
    yield Chunk(token_ids=[140], text="w140 ")
    raise ValueError("my mistake")


async def ends(request, cluster):
    return
    yield


async def junk(request, cluster):
    yield {"text": "hello"}


async def exits(request, cluster):
    raise SystemExit(3)
    yield


async def out_of_range(request, cluster):
    engine = cluster.engines.round_robin()
    async with engine.prep_recv(request, end=1000):
        yield Chunk()


async def goes_on(request, cluster):
    yield Chunk(token_ids=[140], text="x", finish_reason="stop")
    yield Chunk(token_ids=[141], text="y")


async def cancelled(request, cluster):
    task = asyncio.ensure_future(asyncio.sleep(10))
    task.cancel()
    await task
    yield


@pytest.mark.parametrize(
    "function",
    [raises, ends, junk, exits, out_of_range, goes_on, cancelled],
    ids=lambda f: f.__name__,
)
async def test_a_bad_strategy_harms_its_own_request_only(route, fake, function):
    a = fake("a")
    async with route(a, fake("b")) as r:
        r.use(strategy(function))
        status, body = await r.post("/v1/completions", ASK)
        assert (status, body["error"]["type"]) == (500, "strategy_error")
        assert function.__name__ in body["error"]["message"]
        await r.post("/admin/rollback", {})
        assert (await r.post("/v1/completions", ASK))[0] == 200
        await r.settled()


async def test_a_strategy_that_hangs_meets_the_deadline(route, fake):
    @strategy
    async def hangs(request, cluster):
        await asyncio.Event().wait()
        yield Chunk()

    async with route(fake("a"), request_timeout_s=0.05) as r:
        r.use(hangs)
        status, body = await r.post("/v1/completions", ASK)
        assert (status, body["error"]["type"]) == (504, "timeout")
        await r.settled()


async def test_one_failed_leg_cancels_its_sibling(route, fake):
    """The engine's error is reported out of the exception group, and the leases end."""
    p, d = fake("p", send_gate=asyncio.Event()), fake("d", role="decode")
    p.refuse["release"] = []

    @strategy
    async def both(request, cluster):
        engines = sorted(cluster.engines, key=lambda engine: engine.id)
        async with engines[0].prep_recv(request, end=20) as kv, asyncio.TaskGroup() as legs:
            legs.create_task(engines[1].remote_send(request, kv, begin=0, end=10))
            legs.create_task(fails())
        yield Chunk()

    async def fails():
        await p.until(lambda: bool(p.named("remote_send")))
        raise BadRequest("the other leg")

    async with route(p, d) as r:
        r.use(both)
        status, body = await r.post("/v1/completions", ASK)
        assert (status, body["error"]["message"]) == (400, "the other leg")
        assert not d.leases
        assert len(p.named("release")) == 1
        await r.settled()


async def test_n_choices_and_prompts_run_as_requests_of_their_own(route, fake):
    a, b = fake("a"), fake("b")
    async with route(a, b) as r:
        status, body = await r.post("/v1/completions", {**ASK, "prompt": [[1, 2], [3]], "n": 2})
        events = await r.events("/v1/completions", {**ASK, "n": 3})
    assert status == 200
    assert [c["token_ids"][0] for c in body["choices"]] == [102, 102, 101, 101]
    assert body["usage"] == {
        "prompt_tokens": 3, "completion_tokens": 20, "total_tokens": 23,
        "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip
    bodies = a.named("start_generate") + b.named("start_generate")
    assert sorted(body.get("choice", 0) for body in bodies) == [0, 0, 0, 1, 1, 1, 2]
    for index in range(3):
        mine = [c for e in events[:-1] for c in e["choices"] if c["index"] == index]
        assert [token for c in mine for token in c["token_ids"]] == TOKENS


async def test_a_failing_choice_fails_all(route, fake):
    a = fake("a", error_after=[(1, BadRequest("no"))])
    async with route(a, fake("b")) as r:
        status, _ = await r.post("/v1/completions", {**ASK, "n": 2})
        assert status == 400
        await r.settled()


async def test_requests_end_on_the_strategy_generation_they_began_with(route, fake):
    gate = asyncio.Event()
    a, b = fake("a", gate=gate), fake("b")
    async with route(a, b) as r:
        ask = asyncio.create_task(r.events("/v1/completions", ASK, headers={"X-Request-Id": "x"}))
        await a.until(lambda: a.running == 1)
        async with r.http.put(
            r.server.url + "/admin/strategy", json={"name": "prefill_decode", "if_generation": 1}
        ) as response:
            assert (await response.json())["generation"] == 2
        state = await r.get("/admin/strategies")
        assert [(g["generation"], g["in_flight"]) for g in state["generations"]] == [(2, 0), (1, 1)]
        gate.set()
        assert tokens_of(await ask) == TOKENS
        assert (await r.receipt("x"))["generation"] == 1
        state = await r.get("/admin/strategies")
        assert [g["generation"] for g in state["generations"]] == [2]
        async with r.http.put(
            r.server.url + "/admin/strategy", json={"name": "balanced", "if_generation": 1}
        ) as response:
            assert response.status == 409


async def test_shutdown_releases_running_requests(route, fake):
    a = fake("a", gate=asyncio.Event())
    async with route(a) as r:
        ask = asyncio.create_task(r.post("/v1/completions", {**ASK, "stream": True}))
        await a.until(lambda: a.running == 1)
    assert a.named("release")
    with pytest.raises((aiohttp.ClientError, asyncio.CancelledError, ValueError)):
        await ask


async def test_load_is_counted_while_a_request_runs(route, fake):
    p = fake("p", role="prefill", send_gate=asyncio.Event())
    d = fake("d", role="decode", gate=asyncio.Event())
    async with route(p, d, strategy="prefill_decode") as r:
        loads = {backend.id: backend.load for backend in r.server.router.registry}
        ask = asyncio.create_task(r.events("/v1/completions", ASK))
        await p.until(lambda: bool(p.named("remote_send")))
        assert (loads["p"].tokens, loads["p"].streams) == (39, 0)
        assert (loads["d"].tokens, loads["d"].streams) == (0, 1)
        p.send_gate.set()
        await d.until(lambda: d.running == 1)
        assert (loads["p"].tokens, loads["d"].streams) == (0, 1)
        d.gate.set()
        await ask
        await r.settled()
