"""One client's connection: HTTP/1.1 in as few steps from the socket to a handler as there can be.

    bytes ──► llhttp ──► HttpRequest ──► a task: the service answers ──► bytes

llhttp is strict: what could be read in two ways is a 400, and nothing behind it is served.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Mapping
from email.utils import formatdate
from http import HTTPStatus
from typing import Any, Literal, Protocol

import httptools

from engine.protocol import BadRequest, TooLarge
from router.http import HttpRequest, path_of

__all__ = ["Connection", "Connections", "Service"]

log = logging.getLogger(__name__)

MOST_HEADERS = 128
MOST_FIELD = 8190  # bytes of one header, or of a request line
MOST_HEAD = 1 << 16  # bytes of a head that is not here whole
LINGER_S = 2.0  # for a client to read why it was refused, while it still sends
_STATUS = {status.value: b"HTTP/1.1 %d %b\r\n" % (status, status.phrase.encode())
           for status in HTTPStatus}  # fmt: skip
State = Literal["new", "head", "busy", "idle", "over"]


class Service(Protocol):
    """What answers the requests of all connections."""

    async def serve(self, http: HttpRequest) -> None:
        """Answer. Cancelled when the client goes away, or the server ends."""

    def headers(self, http: HttpRequest) -> Mapping[str, str]:
        """What each answer has in its head, beside what it says itself."""


class Connections:
    """All that are open, and what they have in common."""

    def __init__(self, service: Service, max_body: int) -> None:
        """`max_body`: bytes of a request's body, at most."""
        self.service = service
        self.max_body = max_body
        self.open: set[Connection] = set()
        self.closing = False
        self._second = -1
        self._date = b""

    def connection(self) -> Connection:
        """For one that is accepted."""
        return Connection(self)

    async def close(self, bound_s: float) -> None:
        """Close those that are idle, and others as soon as they have answered; after `bound_s`
        seconds all of them, which cancels what they serve."""
        self.closing = True
        busy = []
        for connection in list(self.open):
            if connection.task is None:
                connection.transport.close()
            else:
                busy.append(connection.task)
        if busy:
            await asyncio.wait(busy, timeout=bound_s)
        for connection in list(self.open):
            connection.transport.abort()
        if left := [task for task in busy if not task.done()]:
            await asyncio.wait(left)

    def date(self) -> bytes:
        """The `Date` header, made once a second."""
        now = int(time.time())
        if now != self._second:
            self._second, self._date = now, f"Date: {formatdate(now, usegmt=True)}\r\n".encode()
        return self._date


class Connection(asyncio.Protocol):
    """One connection. Its requests are answered in turn; while one is, the next may wait here, and
    no more is read. `state` since `since` (loop time) is for whoever looks after slow clients."""

    __slots__ = (
        "_deaf", "_drained", "_fields", "_head_bytes", "_headers", "_loop", "_next", "_parser",
        "_receiving", "_shared", "_target", "full", "since", "state", "task", "transport",
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
        self._head_bytes = 0  # of a head that is not here whole; 0: there is none

    # asyncio's

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self._shared.open.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self.state = "over"
        self._shared.open.discard(self)
        self._next.clear()
        if self.task is not None:
            self.task.cancel()
        self.resume_writing()

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._deaf = True  # it is answered as any other, and then closed
        except httptools.HttpParserError as error:
            self._refuse(str(error.__context__ or error))
        else:
            if self._head_bytes:
                self._head_bytes += len(data)
                if self._head_bytes > MOST_HEAD:
                    self._refuse("the head is too long")
            elif self._next:
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
        self._target, self._headers, self._fields, self._head_bytes = b"", {}, 0, 1
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
        if self._fields > MOST_HEADERS:
            raise ValueError("there are too many headers")
        text = value.decode("utf-8", "surrogateescape")
        self._headers.setdefault(name.decode("latin-1").lower(), text)

    def on_headers_complete(self) -> None:
        self._head_bytes = 0
        parser, headers = self._parser, self._headers
        http = self._receiving = HttpRequest(
            self,
            parser.get_method().decode(),
            path_of(self._target),
            headers,
            keep_alive=parser.should_keep_alive() and not parser.should_upgrade(),
            chunks=parser.get_http_version() == "1.1",
        )
        self._take(http)
        if int(headers.get("content-length", 0)) > self._shared.max_body:
            self._too_large(http)

    def on_body(self, data: bytes) -> None:
        http = self._receiving
        if http is not None and http.feed(data) > self._shared.max_body:
            self._too_large(http)

    def on_message_complete(self) -> None:
        http, self._receiving = self._receiving, None
        if http is not None:
            http.end()

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
        self.task = asyncio.Task(self._serve(http), loop=self._loop)

    async def _serve(self, http: HttpRequest) -> None:
        try:
            await self._shared.service.serve(http)
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
                self.transport.resume_reading()
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
        self._loop.call_later(LINGER_S, self.transport.abort)

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
