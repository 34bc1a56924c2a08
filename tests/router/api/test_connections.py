"""The router's connections on transports of the tests: what an application sees, and their end."""

from __future__ import annotations

import asyncio
import time
from contextvars import ContextVar
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from engine.web import BodyBudget, BoundedHttpProtocol, ConnectionLimit
from router.api.connections import Connections

GET = b"GET /a%20b?c HTTP/1.1\r\nHost: x\r\n\r\n"
OUTSIDE: ContextVar[str] = ContextVar("OUTSIDE", default="nothing")


class Transport(asyncio.Transport):
    """Notes what is written. The connection is lost once it is closed, with nothing unread."""

    def __init__(self, protocol: BoundedHttpProtocol) -> None:
        self.written = b""
        self.unread = False
        self.ends: list[str] = []
        self._lost = False
        self._protocol = protocol
        protocol.connection_made(self)

    def write(self, data: Any) -> None:
        self.written += data

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 5) if name in ("peername", "sockname") else default

    def is_closing(self) -> bool:
        return bool(self.ends)

    def close(self) -> None:
        self._end("closed", lost=not self.unread)

    def abort(self) -> None:
        self._end("aborted", lost=True)

    def _end(self, how: str, *, lost: bool) -> None:
        if self._lost:
            return
        self.ends.append(how)
        if lost:
            self._lost = True
            asyncio.get_running_loop().call_soon(self._protocol.connection_lost, None)

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


class App:
    """Answers each request once `gate` is open; a cancelled one takes `cleanup_s` to end."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.cleanup_s = 0.0
        self.scopes: list[Scope] = []
        self.contexts: list[str] = []
        self.ended = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"]["connection"].cancels(asyncio.current_task())
        self.scopes.append(scope)
        self.contexts.append(OUTSIDE.get())
        OUTSIDE.set("another request")
        try:
            await self.gate.wait()
            head = [(b"content-length", b"0")]
            await send({"type": "http.response.start", "status": 200, "headers": head})
            await send({"type": "http.response.body", "body": b""})
        except asyncio.CancelledError:
            await asyncio.sleep(self.cleanup_s)
        finally:
            self.ended += 1


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_request_is_as_the_client_sent_it(caplog: pytest.LogCaptureFixture):
    """Proxies' headers say nothing about the address: they would open the admin API."""
    caplog.set_level("DEBUG")
    app = App()
    connections = Connections(app, BodyBudget())
    protocol = connections.connection()
    transport = Transport(protocol)
    forwarded = b"\r\nX-Forwarded-For: 10.1.2.3\r\nX-Forwarded-Proto: https\r\n\r\n"
    protocol.data_received(GET.replace(b"\r\n\r\n", forwarded))
    await turns()
    (scope,) = app.scopes
    assert scope["client"] == ("127.0.0.1", 5)
    assert (scope["scheme"], scope["path"], scope["query_string"]) == ("http", "/a b", b"c")
    assert scope["asgi"]["version"] == "3.0"
    assert transport.written == b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
    assert not [one for one in caplog.records if one.name.startswith("uvicorn")]
    await connections.close(0.1)


async def test_a_websocket_is_a_request_like_any_other():
    app = App()
    connections = Connections(app, BodyBudget())
    protocol = connections.connection()
    Transport(protocol)
    upgrade = b"\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    protocol.data_received(GET.replace(b"\r\n\r\n", upgrade))
    await turns()
    assert [scope["type"] for scope in app.scopes] == ["http"]
    await connections.close(0.1)


async def test_a_request_does_not_see_the_context_of_another():
    app = App()
    connections = Connections(app, BodyBudget())
    protocol = connections.connection()
    Transport(protocol)
    OUTSIDE.set("the server's")
    for _ in range(2):
        protocol.data_received(GET)
        await turns()
    assert app.contexts == ["nothing", "nothing"]
    await connections.close(0.1)


async def test_idle_connections_close_at_once_and_busy_ones_after_their_response():
    app = App()
    connections = Connections(app, BodyBudget())
    idle, busy = (Transport(connections.connection()) for _ in range(2))
    app.gate.clear()
    busy._protocol.data_received(GET)
    await turns()
    assert connections.open == {idle._protocol, busy._protocol}
    closing = asyncio.create_task(connections.close(60.0))
    await turns()
    assert (idle.ends, busy.ends) == (["closed"], [])
    assert connections.open == {busy._protocol} and not closing.done()
    app.gate.set()
    began = time.monotonic()
    await closing
    assert busy.ends == ["closed"] and b"200 OK" in busy.written
    assert time.monotonic() - began < 5 and not connections.open


async def test_after_the_bound_connections_are_aborted_and_their_requests_awaited():
    app = App()
    app.gate.clear()
    app.cleanup_s = 0.05
    connections = Connections(app, BodyBudget())
    busy = Transport(connections.connection())
    busy._protocol.data_received(GET)
    await turns()
    await connections.close(0.02)
    assert busy.ends == ["aborted"] and app.ended == 1
    await turns()
    assert not connections.open


async def test_a_client_that_does_not_read_keeps_its_connection_until_the_bound():
    connections = Connections(App(), BodyBudget())
    unread = Transport(connections.connection())
    unread.unread = True
    await connections.close(0.0)
    assert unread.ends == ["closed", "aborted"]
    await turns()
    assert not connections.open


async def test_connections_count_towards_the_limit_and_bodies_towards_the_budget():
    budget, limit = BodyBudget(), ConnectionLimit(1)
    app = App()
    app.gate.clear()
    connections = Connections(app, budget, limit)
    first, second = (Transport(connections.connection()) for _ in range(2))
    assert limit.served == 1
    first._protocol.data_received(
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\n" + b"x" * 5
    )
    assert budget.used == 5
    await connections.close(0.0)
    await turns()
    assert (budget.used, limit.served, second.ends[-1]) == (0, 0, "closed")
