"""A scripted engine with the real protocol, real engines, and a router in front of either."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from engine_process import EngineProcess
from tokenizers import Tokenizer, models, pre_tokenizers

from engine.protocol import ModelInfo, NoCapacity, PageName, error_body
from router.base.config import RouterConfig
from router.rollout.catalog import Catalog
from router.server import Server, serving
from router.strategy.definition import Strategy

VOCAB = 1000
PAGE = 16


@cache
def tokenizer_json() -> str:
    """Return a tokenizer with the words `w0 w1 …`: token id i is the word wi."""
    vocab = {f"w{i}": i for i in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer.to_str()


def model_info(**changes: Any) -> ModelInfo:
    fields = {
        "name": "fake", "context_length": 256, "vocab_size": VOCAB, "eos_token_ids": [0],
        "bos_token": None, "eos_token": "w0", "tokenizer_json": tokenizer_json(),
        "chat_template": "{% for m in messages %}{{ m.content }} {% endfor %}",
        "fingerprint": "f", "page_size": PAGE, "kv_bytes_per_token": 4, **changes,
    }  # fmt: skip
    return ModelInfo(**fields)


def token_at(position: int) -> int:
    """Return the token that scripted engines sample at a position, for any prompt."""
    return 100 + position


@dataclass
class FakeEngine:
    """One scripted engine.

    `refuse[call]` lists the errors of the next calls, one each; later calls succeed. `break_after`
    lists for the next generations after how many events their streams break. A generation waits for
    `gate` after its first event. `tells` holds further fields of each event. `prep_tells` replaces
    fields of the replies to `prep_recv`.
    """

    name: str
    role: str = "any"
    epoch: int = 1
    match_len: int = 0
    refuse: dict[str, list[Exception]] = field(default_factory=dict)
    break_after: list[int] = field(default_factory=list)
    error_after: list[tuple[int, Exception]] = field(default_factory=list)
    gate: asyncio.Event | None = None
    prep_gate: asyncio.Event | None = None
    send_gate: asyncio.Event | None = None
    mirror_gate: asyncio.Event | None = None
    info: ModelInfo = field(default_factory=model_info)
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    leases: set[str] = field(default_factory=set)
    cached: list[PageName] = field(default_factory=list)
    followers: int = 0
    running: int = 0
    silent: bool = False
    total_pages: int = 0
    tells: dict[str, Any] = field(default_factory=dict)
    prep_tells: dict[str, Any] = field(default_factory=dict)
    text: str = ""  # the text of each token; if empty, its word
    url: str = ""
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    _lease_of: dict[str, str] = field(default_factory=dict)  # by request id
    _muxes: dict[str, tuple[web.Request, web.StreamResponse]] = field(default_factory=dict)
    _generations: dict[str, tuple[str, asyncio.Task[None]]] = field(default_factory=dict)

    def named(self, call: str) -> list[dict[str, Any]]:
        return [body for name, body in self.calls if name == call]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` holds; it is checked after every call to this engine."""
        async with asyncio.timeout(30), self.changed:
            await self.changed.wait_for(condition)

    async def _note(self, call: str, http: web.Request) -> dict[str, Any]:
        body = await http.json()
        self.calls.append((call, body))
        self.headers.append({key.lower(): value for key, value in http.headers.items()})
        await self._notify()
        if self.refuse.get(call):
            error = self.refuse[call].pop(0)
            headers = {"Retry-After": str(getattr(error, "retry_after_s", 0))}
            raise _Refusal(error, headers)
        return body

    async def _notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    async def prep_recv(self, http: web.Request) -> web.Response:
        body = await self._note("prep_recv", http)
        if self.prep_gate is not None:
            await self.prep_gate.wait()
        lease = f"{self.name}-{len(self.calls)}"
        self.leases.add(lease)
        self._lease_of[body["request_id"]] = lease
        end = body["end"]
        reply = {"lease_id": lease, "kv_addr": f"addr-{lease}", "end": end, "expires_ms": 1000}
        match_len = min(self.match_len, end)
        return web.json_response({**reply, "match_len": match_len, **self.prep_tells})

    async def remote_send(self, http: web.Request) -> web.Response:
        body = await self._note("remote_send", http)
        if self.send_gate is not None:
            await self.send_gate.wait()
        sent = body["end"] - body["begin"]
        return web.json_response(
            {"sent_tokens": sent, "cached_tokens": 0, "computed_tokens": sent,
             "bytes": 4 * sent, "ms": 1.0}
        )  # fmt: skip

    async def commit(self, http: web.Request) -> web.Response:
        body = await self._note("commit", http)
        self.leases.discard(body["lease_id"])
        return web.json_response({"committed_tokens": 0})

    async def mirror(self, http: web.Request) -> web.Response:
        await self._note("mirror", http)
        if self.mirror_gate is not None:
            await self.mirror_gate.wait()
        return web.json_response({"mirrored": True})

    async def release(self, http: web.Request) -> web.Response:
        body = await self._note("release", http)
        self.leases.discard(body.get("lease_id", ""))
        self.leases.discard(self._lease_of.pop(body.get("request_id", ""), ""))
        _, running = self._generations.get(body.get("request_id", ""), ("", None))
        if running is not None:
            running.cancel()
        return web.json_response({})

    async def stream(self, http: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(http)
        await response.write(b"\n")
        self._muxes[http.query["id"]] = (http, response)
        try:
            await asyncio.Event().wait()
        finally:
            del self._muxes[http.query["id"]]
            for stream_id, running in self._generations.values():
                if stream_id == http.query["id"]:
                    running.cancel()

    async def prefixes(self, http: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(http)
        await response.write(json.dumps({"added": self.cached, "removed": []}).encode() + b"\n")
        self.followers += 1
        try:
            return await asyncio.Event().wait()
        finally:
            self.followers -= 1

    async def start_generate(self, http: web.Request) -> web.StreamResponse:
        body = await self._note("start_generate", http)
        self.leases.discard(body.get("lease_id", ""))
        assert body["stream"] == "mux"
        self.running += 1
        running = self._tasks.create_task(self._run(body, *self._muxes[body["stream_id"]]))
        self._generations[body["request_id"]] = (body["stream_id"], running)
        return web.json_response({"request_id": body["request_id"]})

    async def _run(
        self, body: dict[str, Any], http: web.Request, response: web.StreamResponse
    ) -> None:
        async def emit(event: dict[str, Any]) -> None:
            await response.write(json.dumps({body["request_id"]: event}).encode() + b"\n")

        try:
            await self._generate(http, emit, body)
        except ConnectionError:
            pass
        finally:
            del self._generations[body["request_id"]]
            self.running -= 1
            await asyncio.shield(self._notify())

    async def _generate(
        self,
        http: web.Request,
        emit: Callable[[dict[str, Any]], Awaitable[None]],
        body: dict[str, Any],
    ) -> None:
        cut = self.break_after.pop(0) if self.break_after else None
        fail = self.error_after.pop(0) if self.error_after else None
        prompt, done = len(body["prompt"]), len(body.get("output", []))
        limit = body.get("max_tokens", 16)
        begin = body.get("begin", prompt + done - 1)
        for count in range(limit - done):
            if cut is not None and count == cut:
                http.transport.abort()
                return
            if fail is not None and count == fail[0]:
                await emit(error_body(fail[1]))
                return
            token = token_at(prompt + done + count)
            event: dict[str, Any] = {"token_ids": [token], "text": self.text or f"w{token} "}
            event |= self.tells
            if count == 0:
                event["begin"] = begin
            if done + count == limit - 1:
                event["finish_reason"] = "length"
                event["usage"] = {
                    "prompt_tokens": prompt, "completion_tokens": limit,
                    "cached_tokens": begin,
                }  # fmt: skip
            await emit(event)
            if self.gate is not None:
                await self.gate.wait()

    async def health(self, http: web.Request) -> web.Response:
        if self.silent:
            await asyncio.Event().wait()
        return web.json_response({})

    async def model(self, http: web.Request) -> web.Response:
        return web.json_response(self.info.model_dump())

    async def state(self, http: web.Request) -> web.Response:
        pages = dict.fromkeys(
            ("total", "free", "cached", "leased", "active", "quarantined", "pinned"), 0
        )
        pages["total"] = self.total_pages
        return web.json_response(
            {"engine_id": self.name, "epoch": self.epoch, "role": self.role, "model": "fake",
             "page_size": PAGE, "pages": pages, "running": 0, "waiting": 0, "leases": [],
             "puts_in_flight": 0, "prefix_tokens": 0}
        )  # fmt: skip

    @asynccontextmanager
    async def serving(self, port: int = 0) -> AsyncIterator[FakeEngine]:
        app = web.Application(middlewares=[_refusals])
        for call in (
            "prep_recv", "remote_send", "commit", "release", "start_generate", "mirror",
        ):  # fmt: skip
            app.router.add_post(f"/microserving/{call}", getattr(self, call))
        app.router.add_get("/health", self.health)
        app.router.add_get("/microserving/stream", self.stream)
        app.router.add_get("/microserving/prefixes", self.prefixes)
        app.router.add_get("/microserving/model", self.model)
        app.router.add_get("/microserving/state", self.state)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", port)
            await site.start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            async with asyncio.TaskGroup() as self._tasks:
                yield self
                for _, running in self._generations.values():
                    running.cancel()
        finally:
            await runner.cleanup()


class _Refusal(Exception):
    def __init__(self, error: Any, headers: dict[str, str]) -> None:
        self.error = error
        self.headers = headers


@web.middleware
async def _refusals(request: web.Request, handler: Any) -> web.StreamResponse:
    try:
        return await handler(request)
    except _Refusal as refusal:
        headers = refusal.headers if isinstance(refusal.error, NoCapacity) else {}
        status = refusal.error.status
        return web.json_response(error_body(refusal.error), status=status, headers=headers)


@dataclass
class Routed:
    """A router in front of engines, and a client to it."""

    server: Server
    http: aiohttp.ClientSession

    async def post(self, path: str, body: Any, **kwargs: Any) -> tuple[int, dict[str, Any]]:
        async with self.http.post(self.server.url + path, json=body, **kwargs) as response:
            return response.status, await response.json()

    async def get(self, path: str, **kwargs: Any) -> dict[str, Any]:
        async with self.http.get(self.server.url + path, **kwargs) as response:
            return await response.json()

    async def events(self, path: str, body: Any, **kwargs: Any) -> list[Any]:
        """Return the events of a streamed answer; `[DONE]` as a string."""
        body = {"stream": True, **body}
        async with self.http.post(self.server.url + path, json=body, **kwargs) as response:
            assert response.status == 200, await response.text()
            lines = (await response.text()).split("\n\n")
        events = [line.removeprefix("data: ") for line in lines if line]
        return [event if event == "[DONE]" else json.loads(event) for event in events]

    async def receipt(self, request_id: str) -> dict[str, Any]:
        return await self.get(f"/admin/requests/{request_id}")

    def use(self, strategy: Strategy, **params: Any) -> None:
        self.server.router.revisions.activate(strategy.bind(params))

    async def settled(self) -> None:
        """Wait until the cleanup after all requests is done."""
        async with asyncio.timeout(30):
            while not self.idle():  # noqa: ASYNC110  there is no event for this
                await asyncio.sleep(0)

    def idle(self) -> bool:
        """Return whether no engine has load and no revision has requests."""
        router = self.server.router
        loads = [(backend.load.tokens, backend.load.streams) for backend in router.registry]
        counts = [generation.in_flight for generation in router.revisions.live()]
        return not any(map(any, loads)) and not any(counts) and not len(router.queue)


@asynccontextmanager
async def routed(urls: list[str], **config: Any) -> AsyncIterator[Routed]:
    settings = {"port": 0, "health_interval_s": 0.05, "shutdown_s": 0.2, **config}
    async with (
        serving(RouterConfig(engines=tuple(urls), **settings)) as server,
        aiohttp.ClientSession() as http,
    ):
        yield Routed(server, http)


Route = Callable[..., AbstractAsyncContextManager[Routed]]


@pytest.fixture
def route() -> Route:
    """Start scripted engines and a router: `async with route(engine, …, strategy=…) as r`."""

    @asynccontextmanager
    async def start(*engines: FakeEngine, **config: Any) -> AsyncIterator[Routed]:
        async with asyncio.TaskGroup() as servers:
            stop = asyncio.Event()
            up = [asyncio.Event() for _ in engines]

            async def serve(engine: FakeEngine, ready: asyncio.Event) -> None:
                async with engine.serving():
                    ready.set()
                    await stop.wait()

            for engine, ready in zip(engines, up, strict=True):
                servers.create_task(serve(engine, ready))
            for ready in up:
                await ready.wait()
            try:
                async with routed([engine.url for engine in engines], **config) as router:
                    yield router
            finally:
                stop.set()

    return start


@pytest.fixture
def fake() -> type[FakeEngine]:
    return FakeEngine


@pytest.fixture
def catalog() -> Catalog:
    return Catalog()


@pytest.fixture(scope="session")
def real_engines() -> Iterator[list[str]]:
    """URLs of two engine processes with the model `tiny`."""
    engines = [
        EngineProcess("--pool-pages", "2048", "--engine-id", f"engine-{i}", secret="5e" * 32)
        for i in range(2)
    ]
    try:
        yield [engine.url for engine in engines]
    finally:
        for engine in engines:
            engine.stop()
            engine.kill()


@pytest.fixture
def route_real(real_engines: list[str]) -> Route:
    """Like `route`, with the two real engines."""
    return lambda **config: routed(real_engines, **config)


@pytest.fixture
def routed_to() -> Route:
    """Like `route`, with running engines, given by their URLs."""
    return routed
