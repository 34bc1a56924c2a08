"""One client's connection: HTTP/1.1 in as few steps from the socket to a handler as there can be.

    bytes ──► llhttp ──► HttpRequest ──► a task: the service answers ──► bytes

llhttp is strict: what could be read in two ways is a 400, and nothing behind it is served.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from contextvars import Context
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Literal

import httptools

from engine.protocol import BadRequest, TooLarge
from router.api.http import HttpRequest, path_of

if TYPE_CHECKING:
    from router.api.connections import Connections

__all__ = ["Connection"]

MOST_HEADERS = 128
MOST_FIELD = 8190  # bytes of one header, or of a request line
MOST_UNHEARD = 1 << 16  # bytes that come without anything whole in them: a header, a line
MOST_WAITING = 16  # requests that wait for their turn; those of one read may be more
LINGER_S = 2.0  # for a client to read why it was refused, while it still sends
_STATUS = {status.value: b"HTTP/1.1 %d %b\r\n" % (status, status.phrase.encode())
           for status in HTTPStatus}  # fmt: skip
State = Literal["new", "head", "busy", "idle", "over"]


class Connection(asyncio.Protocol):
    """One connection. Its requests are answered in turn; while one is, some more may wait here, and
    then no more is read. `state` since `since` (loop time) is for who looks after slow clients."""

    __slots__ = (
        "_body_left", "_deaf", "_drained", "_fields", "_headers", "_loop", "_next", "_parser",
        "_receiving", "_shared", "_target", "_unheard", "full", "since", "state", "task",
        "transport",
    )  # fmt: skip

    def __init__(self, shared: Connections) -> None:
        self.transport: Any = None  # uvloop's is no subclass of asyncio's
        self.task: asyncio.Task[None] | None = None  # answers a request
        self.full = False  # the client does not read what was written
        self.state: State = "new"
        self._shared = shared
        self._loop = asyncio.get_running_loop()
        self.since = self._loop.time()
        self._parser = httptools.HttpRequestParser(self)
        self._receiving: HttpRequest | None = None
        self._next: deque[HttpRequest] = deque()
        self._drained: asyncio.Future[None] | None = None
        self._deaf = False  # what else comes is not listened to
        self._target = b""
        self._headers: dict[str, str] = {}
        self._fields = 0  # headers, of equal names too
        self._unheard = 0  # bytes since llhttp last made something of them
        self._body_left = 0  # bytes of a body that llhttp takes for another protocol

    # asyncio's

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self._shared.open.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self.state = "over"
        self._shared.forget(self)
        self._next.clear()
        if self.task is not None:
            self.task.cancel()
        self.resume_writing()

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        if self._body_left:
            self._take_body(data)
            return
        self._unheard += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            # It is answered as any other, and the connection then closed.
            self._take_body(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            self._refuse(str(error.__context__ or error))
        else:
            if self._unheard > MOST_UNHEARD:
                self._refuse("a line is too long")
            if len(self._next) >= MOST_WAITING:
                self.transport.pause_reading()

    def pause_writing(self) -> None:
        self.full = True

    def resume_writing(self) -> None:
        self.full = False
        drained, self._drained = self._drained, None
        if drained is not None and not drained.done():
            drained.set_result(None)

    # llhttp's

    def on_message_begin(self) -> None:
        self._target, self._headers, self._fields, self._unheard = b"", {}, 0, 0
        if self.task is None:
            self.state, self.since = "head", self._loop.time()

    def on_url(self, url: bytes) -> None:
        self._target += url
        if len(self._target) > MOST_FIELD:
            raise ValueError("the request line is too long")

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(name) + len(value) > MOST_FIELD:
            raise ValueError("a header is too long")
        self._fields += 1
        self._unheard = 0
        if self._fields > MOST_HEADERS:
            raise ValueError("there are too many headers")
        text = value.decode("utf-8", "surrogateescape")
        self._headers.setdefault(name.decode("latin-1").lower(), text)

    def on_headers_complete(self) -> None:
        parser, headers = self._parser, self._headers
        version, upgrade = parser.get_http_version(), parser.should_upgrade()
        _check_head(version, headers, upgrade)
        self._headers = {}  # what comes behind a body in chunks is none of this
        http = self._receiving = HttpRequest(
            self,
            parser.get_method().decode(),
            path_of(self._target),
            headers,
            keep_alive=parser.should_keep_alive() and not upgrade,
            chunks=version == "1.1",
        )
        self._take(http)
        length = int(headers.get("content-length", 0))
        if length > self._shared.max_body:
            self._too_large(http)
        elif upgrade:
            self._body_left = length

    def on_body(self, data: bytes) -> None:
        http, self._unheard = self._receiving, 0
        if http is not None and http.feed(data) > self._shared.max_body:
            self._too_large(http)

    def on_message_complete(self) -> None:
        self._unheard = 0
        if self._body_left:
            return
        http, self._receiving = self._receiving, None
        if http is not None:
            http.end()

    def _take_body(self, data: bytes) -> None:
        """Of a request that would also go on in another protocol."""
        if body := data[: self._body_left]:
            self.on_body(body)
            self._body_left -= len(body)
        if not self._body_left:
            self._deaf = True
            self.on_message_complete()

    def _too_large(self, http: HttpRequest) -> None:
        self._receiving = None
        http.fail(TooLarge("the body is too large"))

    def _refuse(self, why: str) -> None:
        """What came is no HTTP: say so, after what came before it was answered."""
        http, self._receiving, self._deaf = self._receiving, None, True
        if http is None:
            http = HttpRequest(self, "", "", {}, keep_alive=False, chunks=True)
            self._take(http)
        http.fail(BadRequest(why))

    # Serving

    def _take(self, http: HttpRequest) -> None:
        if self.task is None:
            self._start(http)
        else:
            self._next.append(http)

    def _start(self, http: HttpRequest) -> None:
        self.state, self.since = "busy", self._loop.time()
        # A context of its own: the request before it, which may start it, has left things in its.
        self.task = asyncio.Task(self._serve(http), loop=self._loop, context=Context())

    async def _serve(self, http: HttpRequest) -> None:
        try:
            await self._shared.service.serve(http)
            if self.full:
                await self.drain()  # who does not read its answers is given no further ones
        except ConnectionResetError:
            pass  # the client has gone while we wrote: nobody is there to be told
        finally:
            self.task = None
            if self.state != "over":
                self._served(http)

    def _served(self, http: HttpRequest) -> None:
        if not http.answered:
            self.transport.abort()
        elif not http.keep_alive or self._shared.closing:
            self._hang_up(heard=http.complete and not self._deaf)
        elif self._next:
            self._start(self._next.popleft())
            if not self._next:
                self.transport.resume_reading()  # whether it was paused or not
        else:
            self.state, self.since = "idle", self._loop.time()

    def _hang_up(self, *, heard: bool) -> None:
        """Close. Who still sends may not read the answer before, and would lose it if what it sends
        met a closed connection: that is heard out for a while."""
        self.state = "over"
        if heard:
            self.transport.close()
            return
        self._deaf = True
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._loop.call_later(LINGER_S, self._stop_listening)

    def _stop_listening(self) -> None:
        if self.transport.get_write_buffer_size():  # it still reads, or is dropped as too slow
            self._loop.call_later(LINGER_S, self._stop_listening)
        else:
            self.transport.abort()

    # What handlers use

    def go_on(self) -> None:
        """The client waits to be asked for the body."""
        self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def begin(
        self, http: HttpRequest, status: int, headers: Mapping[str, str], length: int | None
    ) -> bytes:
        """The head of an answer, to be sent at once. `length` of its body; None: it ends with its
        last chunk, or with the connection."""
        http.begun = True
        if not http.complete or self._shared.closing or (length is None and not http.chunks):
            http.keep_alive = False
        more = self._shared.service.headers(http)
        lines = [f"{name}: {value}\r\n" for name, value in (*headers.items(), *more.items())]
        if length is not None:
            lines.append(f"Content-Length: {length}\r\n")
        elif http.chunks:
            lines.append("Transfer-Encoding: chunked\r\n")
        if not http.keep_alive:
            lines.append("Connection: close\r\n")
        elif not http.chunks:
            lines.append("Connection: keep-alive\r\n")  # HTTP/1.0 does not expect it
        head = "".join(lines).encode("utf-8", "surrogateescape")
        return b"%b%b%b\r\n" % (_STATUS[status], self._shared.date(), head)

    async def drain(self) -> None:
        """Wait until the client has read most of what was written. Raises `ConnectionResetError`
        if it goes away."""
        if self.full:
            if self._drained is None:
                self._drained = self._loop.create_future()
            await asyncio.shield(self._drained)
        if self.transport.is_closing():
            raise ConnectionResetError("the client has gone")


def _check_head(version: str, headers: Mapping[str, str], upgrade: bool) -> None:
    """What llhttp lets pass and HTTP does not (RFC 9112, §3.2 and §6.1). Raises `ValueError`."""
    if version not in ("1.0", "1.1"):
        raise ValueError(f"this is HTTP/1.1, not {version}")
    if version == "1.1" and "host" not in headers:
        raise ValueError("there is no Host")
    coding = headers.get("transfer-encoding")
    if coding is not None and (coding.lower() != "chunked" or version == "1.0" or upgrade):
        raise ValueError(f"a body in the transfer coding {coding!r} cannot be read here")
