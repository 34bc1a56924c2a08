"""One HTTP request as its handler sees it, and what it answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar
from urllib.parse import unquote

import httptools
import orjson

from engine.protocol import MicroserveError
from router.admission.keys import Key

if TYPE_CHECKING:
    from router.api.connection import Connection
    from router.telemetry.receipts import Receipt
    from router.telemetry.trace import Trace

__all__ = ["HttpRequest", "HttpResponse", "HttpStream", "json_response", "off_loop", "path_of"]

P = ParamSpec("P")
T = TypeVar("T")

# Up to here, reading and tokenizing takes well under a millisecond or two: a thread costs more.
SMALL_BODY = 8 * 1024


@dataclass(slots=True)
class HttpResponse:
    """An answer in one piece."""

    body: bytes = b""
    status: int = 200
    media: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)


def json_response(body: Any, *, status: int = 200) -> HttpResponse:
    return HttpResponse(orjson.dumps(body, option=orjson.OPT_NON_STR_KEYS), status)


class HttpRequest:
    """A request whose head is here; its body may still come.

    `path` is decoded; `params` are the parts of it that its route names. Names of `headers` are in
    lower case; of equal ones the first counts; what is no UTF-8 in them comes as surrogates. What
    the router knows of who asks, and of what became of it, is kept here too.
    """

    __slots__ = (
        "_body", "_waiter", "answered", "begun", "caller", "chunks", "complete",
        "connection", "error", "headers", "id", "keep_alive", "method", "params", "path", "receipt",
        "trace", "who",
    )  # fmt: skip

    def __init__(
        self,
        connection: Connection,
        method: str,
        path: str,
        headers: dict[str, str],
        *,
        keep_alive: bool,
        chunks: bool,
    ) -> None:
        """`chunks`: the client understands answers in chunks."""
        self.connection = connection
        self.method = method
        self.path = path
        self.params: Mapping[str, str] = {}
        self.headers = headers
        self.keep_alive = keep_alive
        self.chunks = chunks
        self.complete = False  # all of its body is here
        self.error: MicroserveError | None = None  # what is wrong with its head or its body
        self.begun = False  # the head of its answer has been sent
        self.answered = False  # and all of the answer
        self.id = ""
        self.caller: Key | None = None  # by its API key, where one is asked for
        self.who = ""  # of the admin API
        self.receipt: Receipt | None = None
        self.trace: Trace | None = None
        self._body = bytearray()
        self._waiter: asyncio.Future[None] | None = None

    @property
    def remote(self) -> str:
        """The address of who asks; empty if it has gone."""
        peer = self.connection.transport.get_extra_info("peername")
        return peer[0] if isinstance(peer, tuple) else ""

    async def read(self) -> bytes:
        """The body. Raises `BadRequest` or `TooLarge`, as soon as it is known to be either."""
        if self.error is None and not self.complete:
            expects = self.headers.get("expect", "").lower() == "100-continue"
            if expects and self.chunks and not self._body:  # HTTP/1.0 does not know it
                self.connection.go_on()
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self.error is not None:
            raise self.error
        return bytes(self._body)

    def feed(self, data: bytes) -> int:
        """A part of the body has come; returns how many bytes are here."""
        self._body += data
        return len(self._body)

    def end(self) -> None:
        """All of it has come."""
        self.complete = True
        self._wake()

    def fail(self, error: MicroserveError) -> None:
        """No more of it comes, or is wanted: `read` raises `error`. It is answered, and then the
        connection is closed."""
        self.error, self._body = error, bytearray()
        self.keep_alive = False
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def respond(self, response: HttpResponse) -> None:
        """Send the answer."""
        headers, body = response.headers, response.body
        headers.setdefault("Content-Type", response.media)
        head = self.connection.begin(self, response.status, headers, len(body))
        self.connection.transport.write(head if self.method == "HEAD" else head + body)
        self.answered = True

    def stream(self, headers: Mapping[str, str]) -> HttpStream:
        """An answer that comes in parts; its head is sent with the first of them."""
        return HttpStream(self, headers)

    def abort(self) -> None:
        """Close the connection at once; this request is cancelled."""
        self.connection.transport.abort()


class HttpStream:
    """An answer of status 200 in parts. Raises `ConnectionResetError` if the client is gone."""

    __slots__ = ("_connection", "_headers", "_http")

    def __init__(self, http: HttpRequest, headers: Mapping[str, str]) -> None:
        self._http = http
        self._headers = headers
        self._connection = http.connection

    @property
    def begun(self) -> bool:
        return self._http.begun

    def write(self, data: bytes) -> Awaitable[None] | None:
        """Send `data`. What is returned is to be awaited: None, if there is nothing to wait for."""
        self._send(data, b"")
        return self._connection.drain() if self._connection.full else None

    def end(self, data: bytes) -> None:
        """Send the last of it, and that there is no more."""
        self._send(data, b"0\r\n\r\n")
        self._http.answered = True

    def _send(self, data: bytes, end: bytes) -> None:
        http, connection = self._http, self._connection
        if connection.transport.is_closing():
            raise ConnectionResetError("the client has gone")
        if http.method == "HEAD":
            data = b""
        elif http.chunks:
            data = b"%x\r\n%b\r\n%b" % (len(data), data, end) if data else end
        if not http.begun:
            data = connection.begin(http, 200, self._headers, None) + data
        connection.transport.write(data)


async def off_loop(size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Do `work` on `size` bytes without holding up the event loop: in a thread if there is much."""
    if size <= SMALL_BODY:
        return work(*args, **kwargs)
    return await asyncio.to_thread(work, *args, **kwargs)


def path_of(target: bytes) -> str:
    """The decoded path of a request's target, `/path?query` mostly. Raises `ValueError`."""
    if not target.startswith(b"/"):
        try:
            target = httptools.parse_url(target).path or b"/"
        except httptools.HttpParserInvalidURLError:
            raise ValueError("the target is no URL") from None
    return unquote(target.partition(b"?")[0])
