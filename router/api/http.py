"""HTTP requests and responses as handlers see them, over the ASGI calls of any server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from email.utils import formatdate
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import orjson

from engine.web import ClientConnection, check_input, linger, read_body
from router.admission import Key

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from router.telemetry import Receipt, Trace

__all__ = [
    "Handler",
    "HttpRequest",
    "HttpResponse",
    "HttpStream",
    "RawHeaders",
    "encoded",
    "json_response",
    "off_loop",
]

P = ParamSpec("P")
T = TypeVar("T")
RawHeaders = list[tuple[bytes, bytes]]

# Parsing and tokenizing this many bytes takes less than a thread costs.
SMALL_BODY = 8 * 1024


@dataclass(slots=True)
class HttpResponse:
    """A response in one piece."""

    body: bytes = b""
    status: int = 200
    media: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)


def json_response(body: Any, *, status: int = 200) -> HttpResponse:
    """Return `body` as JSON. Keys of objects may be of any JSON type."""
    return HttpResponse(orjson.dumps(body, option=orjson.OPT_NON_STR_KEYS), status)


class HttpRequest:
    """One request, whose body may still arrive.

    `path` is decoded. Header names are in lower case. The first of several headers with one name
    counts. Bytes that are not UTF-8 become surrogates. The request also carries what the router
    learns about its caller and its outcome.
    """

    __slots__ = (
        "_body", "_state", "begun", "caller", "close", "complete", "connection",
        "counted", "extra_headers", "headers", "id", "max_body", "method", "path", "receipt",
        "receive", "route", "scope", "send", "status", "task", "trace", "who",
    )  # fmt: skip

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        *,
        max_body: int,
        extra_headers: Callable[[HttpRequest], RawHeaders],
    ) -> None:
        """`max_body`: bytes. `extra_headers` is called just before the response's head is sent."""
        headers: dict[str, str] = {
            name.decode("latin-1"): value.decode("utf-8", "surrogateescape")
            for name, value in reversed(scope["headers"])  # of equal names, the first one stays
        }
        self.scope = scope
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.route = "other"  # the path of its route, for metrics
        self.status = 0  # of the response, once its head is sent
        self.headers = headers
        self._state: Mapping[str, Any] = scope.get("state", {})
        self.connection: ClientConnection | None = self._state.get("connection")
        self.extra_headers = extra_headers
        self.complete = False  # the whole body has arrived
        self.begun = False  # the response's head has been sent
        self.close = False  # close the connection after the response
        self.id = ""
        self.caller: Key | None = None  # by API key, where one is required
        self.who = ""  # the caller of the admin API
        self.counted: Callable[[], None] = _nothing  # called once the work on it is accounted for
        self.receipt: Receipt | None = None
        self.trace: Trace | None = None
        self.max_body = max_body  # bytes
        self._body = b""
        self.receive, self.send = receive, send
        self.task: asyncio.Task[Any] | None = None  # that serves it, if the gate knows

    @property
    def remote(self) -> str:
        """The client's address; empty if it has disconnected."""
        client = self.scope.get("client")
        return client[0] if client else ""

    @property
    def arrived(self) -> bool:
        """Whether the whole body is here, read or not."""
        return self.complete or (self.connection is not None and self.connection.arrived)

    def check(self) -> None:
        """Raise `BadRequest` if this is not valid HTTP, `Overloaded` if its body has no room."""
        check_input(self._state)

    async def read(self) -> bytes:
        """Return the body. Raises `BadRequest`, `TooLarge` or `Overloaded`, once it is known."""
        if self.complete:
            return self._body
        self._body = await read_body(self.scope, self.receive, self.max_body)
        self.complete = True
        return self._body

    def release(self) -> None:
        """Forget the body, which has been parsed. Further reads return b""."""
        self._body = b""
        if self.connection is not None:
            self.connection.release_body()

    async def respond(self, response: HttpResponse) -> None:
        """Send a response in one piece.

        If the request's body has not arrived, the connection is closed.
        """
        headers = encoded(response.headers) if response.headers else []
        if "Content-Type" not in response.headers:
            headers.append((b"Content-Type", response.media.encode()))
        headers.append((b"Content-Length", b"%d" % len(response.body)))
        lingers = not self.arrived
        await self.begin(response.status, headers)
        await self.send_body(response.body, more=lingers)
        if lingers:
            await linger(self.connection, self.receive)
            await self.send_body(b"", more=False)

    async def begin(self, status: int, headers: RawHeaders) -> None:
        """Send the response's head."""
        self.status = status
        raw = [_date(), *headers, *self.extra_headers(self)]
        if self.close or not self.arrived:
            raw.append((b"connection", b"close"))
        await self.send({"type": "http.response.start", "status": status, "headers": raw})
        self.begun = True

    def send_body(self, data: bytes, *, more: bool) -> Awaitable[None]:
        """Send a part of the response's body; `more` follows. Waits until the client has read most
        of what was sent before."""
        return self.send({"type": "http.response.body", "body": data, "more_body": more})

    def stream(self, headers: RawHeaders) -> HttpStream:
        """Return a response of status 200 that is sent in parts; its head precedes the first."""
        return HttpStream(self, headers)

    def abort(self) -> None:
        """Close the connection at once, which cancels this request."""
        if self.connection is not None:
            self.connection.abort()


# Returns its response, or None if it has sent it itself, in parts.
Handler = Callable[[HttpRequest], Awaitable[HttpResponse | None]]


class HttpStream:
    """A response of status 200 in parts."""

    __slots__ = ("_headers", "_http", "_opening", "_send")

    def __init__(self, http: HttpRequest, headers: RawHeaders) -> None:
        self._http = http
        self._send = http.send
        self._headers = headers
        self._opening = asyncio.Lock()

    @property
    def begun(self) -> bool:
        """Whether the head has been sent."""
        return self._http.begun

    def write(self, data: bytes) -> Awaitable[None]:
        """Send `data`. Waits while the client has more than 64 KiB left to read."""
        if self._http.begun:
            return self._send({"type": "http.response.body", "body": data, "more_body": True})
        return self._open(data)

    async def end(self, data: bytes) -> None:
        """Send `data` and the end of the stream."""
        await self._open(data, more=False)

    async def _open(self, data: bytes, *, more: bool = True) -> None:
        if not self._http.begun:
            async with self._opening:  # several choices may write at once
                if not self._http.begun:
                    await self._http.begin(200, self._headers)
        await self._http.send_body(data, more=more)


async def off_loop(size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run `work` on `size` bytes without blocking the event loop: beyond `SMALL_BODY`, in a
    thread."""
    if size <= SMALL_BODY:
        return work(*args, **kwargs)
    return await asyncio.to_thread(work, *args, **kwargs)


def encoded(headers: Mapping[str, str]) -> RawHeaders:
    """Return headers as ASGI's pairs of bytes."""
    return [
        (name.encode("latin-1"), value.encode("utf-8", "surrogateescape"))
        for name, value in headers.items()
    ]


def _nothing() -> None:
    pass


class _Clock:
    """The `Date` header, formatted once a second."""

    second = -1
    header = (b"date", b"")


def _date() -> tuple[bytes, bytes]:
    now = int(time.time())
    if now != _Clock.second:
        _Clock.second, _Clock.header = now, (b"date", formatdate(now, usegmt=True).encode())
    return _Clock.header
