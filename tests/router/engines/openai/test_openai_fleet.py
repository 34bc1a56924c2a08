"""A router in front of OpenAI servers in this process: queue, breaker, retries, strategies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from scripted_openai import FILES, TOKENIZER, ScriptedOpenAI, said
from waiting import until

PROMPT = [5, 6, 7, 8, 9, 10]
ASK = {"prompt": PROMPT, "max_tokens": 30, "temperature": 0, "return_token_ids": True}
TEXT = TOKENIZER.decode(said(6, 30))

Front = Callable[..., AbstractAsyncContextManager[Any]]


@pytest.fixture
def front(routed_to: Any, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Front:
    """Start servers and a router that knows their tokenizer, and wait until all are up."""

    async def read(name: str) -> Any:
        assert name == "files"
        return FILES

    async def checked(*_: Any, **__: Any) -> list[str]:
        return []

    monkeypatch.setattr("router.assembly.read_model_files", read)
    # The dry run on such a fleet takes seconds; `test_the_strategy_is_checked_on_the_fleet` has it.
    if "checked_on_the_fleet" not in request.node.name:
        monkeypatch.setattr("router.server.check_on_fleet", checked)

    @asynccontextmanager
    async def start(*servers: ScriptedOpenAI, **config: Any) -> AsyncIterator[Any]:
        async with AsyncExitStack() as stack:
            for server in servers:
                await stack.enter_async_context(server.serving())
            urls = [server.url for server in servers]
            router = routed_to(urls, openai_tokenizer="files", **config)
            r = await stack.enter_async_context(router)
            await until(lambda: all(one.status == "up" for one in r.server.router.registry))
            yield r
            await r.settled()

    return start


def streams(*servers: ScriptedOpenAI) -> list[int]:
    return [len(server.streams) for server in servers]


@pytest.mark.parametrize("strategy", ["data_parallel", "cache_aware"])
async def test_requests_are_spread(front, strategy):
    a, b = ScriptedOpenAI(), ScriptedOpenAI(ids="none")
    async with front(a, b, strategy=strategy) as r:
        replies = await asyncio.gather(
            *(r.post("/v1/completions", {**ASK, "prompt": [*PROMPT[:5], n]}) for n in range(9, 17))
        )
        assert all(status == 200 for status, _ in replies)
        assert {body["choices"][0]["text"] for _, body in replies} == {TEXT}
        assert {body["usage"]["completion_tokens"] for _, body in replies} == {30}
        assert min(streams(a, b)) >= 2


async def test_the_strategy_is_checked_on_the_fleet(front, caplog: pytest.LogCaptureFixture):
    async with front(ScriptedOpenAI(), ScriptedOpenAI(), strategy="migrate") as r:
        status, body = await r.post("/v1/completions", ASK)
        assert (status, body["choices"][0]["text"]) == (200, TEXT)
    assert "on these engines, migrate falls back: " in caplog.text


async def test_chat_and_streams(front):
    async with front(ScriptedOpenAI(lag=3)) as r:
        body = {"messages": [{"role": "user", "content": "Gr\u00fc\u00df"}], "max_tokens": 30}
        _, whole = await r.post("/v1/chat/completions", body)
        assert whole["choices"][0]["message"]["content"] == TEXT
        events = await r.events("/v1/chat/completions", body)
        assert "".join(e["choices"][0]["delta"].get("content", "") for e in events[:-1]) == TEXT


@pytest.mark.slow
@pytest.mark.parametrize("ids", ["token_ids", "none"])
async def test_a_stream_goes_on_where_its_server_broke_off(front, ids):
    """After every number of tokens, within characters too: nothing is repeated or lost."""
    a, b = ScriptedOpenAI(ids=ids, lag=2), ScriptedOpenAI(ids=ids, lag=2)
    async with front(a, b, stream_interval_ms=0, breaker_failures=10**6) as r:
        for cut in range(25):
            a.cut_after, b.cut_after = [cut], []
            for number in range(2):  # the servers take turns
                await until(lambda: all(one.status == "up" for one in r.server.router.registry))
                events = await r.events(
                    "/v1/completions", ASK, headers={"X-Request-Id": f"{number}"}
                )
                parts = [event["choices"][0] for event in events[:-1]]
                assert "".join(part["text"] for part in parts) == TEXT
                assert [token for part in parts for token in part["token_ids"]] == said(6, 30)
            receipts = [await r.receipt(f"{number}") for number in range(2)]
            assert sum(len(receipt["retries"]) for receipt in receipts) == 1
            assert {receipt["completion_tokens"] for receipt in receipts} == {30}


async def test_a_full_server_makes_requests_wait(front):
    server = ScriptedOpenAI()
    async with front(server) as r:
        server.refuse = [
            (429, {"error": {"message": "full"}}, {"Retry-After": "0.05"}),
            (503, {"error": {"message": "loading"}}, {"Retry-After": "0.05"}),
        ]
        status, body = await r.post("/v1/completions", ASK, headers={"X-Request-Id": "waits"})
        assert (status, body["choices"][0]["text"]) == (200, TEXT)
        assert (await r.receipt("waits"))["retries"] == []
    async with front(server, queue_timeout_s=0.2) as r:
        server.refuse = [(429, {"error": {"message": "full"}}, {"Retry-After": "9"})]
        async with r.http.post(r.server.url + "/v1/completions", json=ASK) as reply:
            assert reply.status == 429 and int(reply.headers["Retry-After"]) >= 1


async def test_a_bad_request_is_the_clients(front):
    server = ScriptedOpenAI()
    async with front(server, strategy="data_parallel") as r:
        server.refuse = [(400, {"error": {"message": "stop is too long", "param": "stop"}}, {})]
        status, body = await r.post("/v1/completions", ASK)
        assert (status, body["error"]["message"], body["error"]["param"]) == (
            400, "stop is too long", "stop",
        )  # fmt: skip
        status, body = await r.post("/v1/completions", {**ASK, "min_tokens": 2})
        assert (status, body["error"]["param"]) == (400, "min_tokens")
        assert len(server.streams) == 1


async def test_failures_open_the_breaker(front):
    a, b = ScriptedOpenAI(), ScriptedOpenAI()
    async with front(a, b, breaker_failures=2, breaker_open_s=60) as r:
        a.refuse = [(500, {"error": {"message": "boom"}}, {})] * 2
        for _ in range(6):
            status, body = await r.post("/v1/completions", ASK)
            assert (status, body["choices"][0]["text"]) == (200, TEXT)
        (one, _) = r.server.router.registry
        assert one.breaker.state == "open"
        assert streams(a, b) == [2, 6]


async def test_a_client_that_leaves_ends_the_call(front):
    server = ScriptedOpenAI(gate=asyncio.Event())
    async with front(server) as r:
        body = {**ASK, "stream": True}
        async with r.http.post(r.server.url + "/v1/completions", json=body) as reply:
            await reply.content.readline()
            assert server.running == 1
        await until(lambda: server.running == 0 and server.left == 1)


@pytest.mark.parametrize("metrics", [True, False])
async def test_a_silent_server_is_given_up(front, metrics):
    """Also one of which only this router's own streams tell that it works."""
    a, b = ScriptedOpenAI(), ScriptedOpenAI()
    a.gate = asyncio.Event()
    async with front(a, b, engine_silence_s=0.2) as r:
        if metrics:
            a.more["/metrics"] = (200, "vllm:num_requests_running 0\n")
            for backend in r.server.router.registry:
                backend.client._server._told = True
        for _ in range(2):
            status, body = await r.post("/v1/completions", ASK)
            assert (status, body["choices"][0]["text"]) == (200, TEXT)


async def test_a_draining_server_hands_its_streams_over(front):
    a, b = ScriptedOpenAI(gate=asyncio.Event()), ScriptedOpenAI()
    async with front(a, b) as r:
        asked = asyncio.create_task(r.post("/v1/completions", ASK))
        other = asyncio.create_task(r.post("/v1/completions", ASK))
        await until(lambda: a.running == 1)
        (one, _) = r.server.router.registry
        async with r.http.patch(
            f"{r.server.url}/admin/engines/{one.id}", json={"draining": True}
        ) as reply:
            assert (await reply.json())["moved"] == 1
        for task in (asked, other):
            status, body = await task
            assert (status, body["choices"][0]["token_ids"]) == (200, said(6, 30)), body


async def test_servers_by_the_admin_api(front):
    a, b = ScriptedOpenAI(), ScriptedOpenAI(models=[{"id": "other"}, {"id": "m"}])
    async with front(a) as r, b.serving():
        status, body = await r.post("/admin/engines", {"url": "openai+http://a?b=c"})
        assert (status, "options" in body["error"]["message"]) == (400, True)
        status, _ = await r.post("/admin/engines", {"url": f"{b.url}?model=m", "id": "second"})
        assert status == 200
        second = r.server.router.registry["second"]
        await until(lambda: second.status == "up")
        assert (second.id, second.model.capabilities) == ("second", [])
        listed = (await r.get("/admin/engines"))["engines"]
        assert [one["id"] for one in listed] == [a.url.split("//")[1], "second"]


async def test_a_server_with_another_model_stays_out(front):
    a, b = ScriptedOpenAI(), ScriptedOpenAI(models=[{"id": "other"}])
    async with front(a) as r, b.serving():
        await r.post("/admin/engines", {"url": b.url, "id": "b"})
        backend = r.server.router.registry["b"]
        await backend.settled.wait()
        assert backend.status == "down" and "other" in backend.last_error


async def test_the_tokenizer_of_an_engine_with_the_same_model(fake, routed_to):
    """The description is there; mixed fleets are up to the registry."""
    engine, server = fake("ours"), ScriptedOpenAI(models=[{"id": "fake"}])
    async with engine.serving(), routed_to([engine.url]) as r, server.serving():
        await r.post("/v1/completions", {"prompt": [1, 2], "max_tokens": 2})
        await r.post("/admin/engines", {"url": server.url, "id": "theirs"})
        info = await r.server.router.registry["theirs"].client.model()
        assert (info.tokenizer_json, info.vocab_size) == (
            engine.info.tokenizer_json, engine.info.vocab_size,
        )  # fmt: skip
