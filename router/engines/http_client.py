"""A minimal HTTP/1.1 client of one server, for the calls to engines.

Every request makes such calls, and a general client costs several times as much as the call itself.
This one writes a request in one piece, parses the reply with llhttp in the callback that delivers
the bytes, and wakes the caller once, when the whole reply is there. What the server sends is
bounded: a reply by the caller's limit; heads, trailers and the framing of chunks by `MOST_HEAD`.
"""

from __future__ import annotations

import asyncio
import errno
import ssl
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httptools

from router.base import EngineUnreachable, NobodyListens, OutOfFiles

__all__ = ["HttpClient", "Reply"]

# Servers close idle connections after 5 s or more, and a request on a connection that is just being
# closed fails. So idle connections are closed earlier here.
KEEPALIVE_S = 3.0
MOST_IDLE = 64  # connections kept between calls; only a burst leaves more
MOST_HEAD = 64 << 10  # bytes that may follow one another without one of a body
MOST_REPLY = 16 << 20  # bytes of a body, unless the caller sets another limit
HEAD_S = 10.0  # until the head of a stream
NO_FILES = frozenset({errno.EMFILE, errno.ENFILE})
Sink = Callable[[bytes], None]


class Reply(NamedTuple):
    """A whole reply, or the head of a stream."""

    status: int
    retry_after: str | None
    body: bytes


class HttpClient:
    """Connections to the server at `url`, kept open between calls.

    Every call raises `EngineUnreachable` if the server cannot be reached or closes the connection
    early, `NobodyListens` if it refuses connections, and `OutOfFiles` if this process cannot open
    another one. A cancelled call closes its connection.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str = "",
        connect_timeout_s: float = 2.0,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`tls` is for an https URL; defaults to the system trust store."""
        self.url = url.rstrip("/")
        self._tls = tls
        self._connect_timeout_s = connect_timeout_s
        parts = urlsplit(self.url)
        self._path = parts.path
        self._head = f"Host: {parts.netloc}\r\nContent-Type: application/json\r\n"
        if api_key:
            self._head += f"Authorization: Bearer {api_key}\r\n"
        self._idle: deque[_Connection] = deque()  # least recently used first
        self._open: set[_Connection] = set()
        self._retired = False

    async def call(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        *,
        sink: Sink | None = None,
        most: int = MOST_REPLY,
    ) -> Reply:
        """Send a request and return its whole reply, whatever its status.

        `sink` receives the body of a reply of status 200 as it arrives; `Reply.body` is empty then.
        It must not raise. Other bodies have `most` bytes at most; a larger one raises
        `EngineUnreachable`.
        """
        request = self._request(method, path, body, headers or {})
        connection = self._reuse() or await self._connect()
        connection.sink = sink
        try:
            reply = await connection.send(request, most)
        except BaseException:
            connection.close()
            raise
        if connection.reusable and len(self._idle) < MOST_IDLE and not self._retired:
            connection.idle_since = connection.loop.time()
            self._idle.append(connection)
        else:
            connection.close()
        return reply

    async def listen(
        self, path: str, sink: Sink, lost: Callable[[EngineUnreachable], None]
    ) -> tuple[Reply, Callable[[], None]]:
        """Open a stream and return its head and a function that closes it.

        `sink` receives the body as it arrives. `lost` is called when the stream ends, unless it was
        closed before. A reply with a status other than 200 is no stream: it is returned whole.
        Raises `EngineUnreachable` if there is no head within `HEAD_S`.
        """
        connection = await self._connect()
        connection.sink, connection.lost = sink, lost
        try:
            async with asyncio.timeout(HEAD_S):
                reply = await connection.send(self._request("GET", path, b"", {}), MOST_REPLY)
        except TimeoutError:
            connection.close()
            raise EngineUnreachable(f"{self.url}: no stream within {HEAD_S:g} s") from None
        except BaseException:
            connection.close()
            raise
        if reply.status != 200:
            connection.close()
        return reply, connection.close

    def retire(self) -> None:
        """Keep no connection open for further calls; close each when its call ends."""
        self._retired = True
        while self._idle:
            self._idle.pop().close()

    def close(self) -> None:
        """Close all connections; calls that wait on them fail."""
        for connection in list(self._open):
            connection.close()

    def _request(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> bytes:
        extra = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
        if extra.count("\n") != len(headers):
            raise ValueError(f"a header with a line break in it: {headers}")
        head = (
            f"{method} {self._path}{path} HTTP/1.1\r\n{self._head}{extra}"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        return head.encode("utf-8", "surrogateescape") + body

    def _reuse(self) -> _Connection | None:
        """Return the most recently used idle connection, if any; close those idle for too long."""
        now = asyncio.get_running_loop().time()
        while self._idle and now - self._idle[0].idle_since > KEEPALIVE_S:
            self._idle.popleft().close()
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable:
                return connection
        return None

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            parts = urlsplit(self.url)
            secure = parts.scheme == "https"
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await loop.create_connection(
                    lambda: _Connection(self),
                    parts.hostname or "",
                    parts.port or (443 if secure else 80),
                    ssl=(self._tls or ssl.create_default_context()) if secure else None,
                )
        except TimeoutError:
            message = f"{self.url}: no connection within {self._connect_timeout_s:g} s"
            raise EngineUnreachable(message) from None
        except OSError as error:
            if error.errno in NO_FILES:
                message = f"no further connection can be opened: {error}"
                raise OutOfFiles(message, retry_after_s=0.1) from error
            raise NobodyListens(f"{self.url}: {error}") from error
        except ValueError as error:  # no such host name, no such port
            raise EngineUnreachable(f"{self.url}: {error}") from error
        return connection


class _Connection(asyncio.Protocol):
    """One connection: one request at a time. llhttp calls the `on_…` methods."""

    def __init__(self, client: HttpClient) -> None:
        self.loop: asyncio.AbstractEventLoop  # from `connection_made` on
        self.idle_since: float  # loop time, from the end of its first call on
        self.sink: Sink | None = None
        self.lost: Callable[[EngineUnreachable], None] | None = None
        self._client = client
        self._transport: Any = None  # uvloop's is no subclass of asyncio's
        self._parser = httptools.HttpResponseParser(self)
        self._reply: asyncio.Future[Reply] | None = None
        self._retry_after: str | None = None
        self._body: bytes | bytearray = b""
        self._most = MOST_REPLY  # bytes of a body
        self._bodiless = 0  # bytes received since the last one of a body

    @property
    def reusable(self) -> bool:
        return not self._transport.is_closing() and self._reply is None

    def send(self, request: bytes, most: int) -> asyncio.Future[Reply]:
        """Send a request; the future is done when the reply is complete.

        A body that is collected has `most` bytes at most.
        """
        self._most = most
        self._reply = reply = self.loop.create_future()
        self._transport.write(request)
        return reply

    def close(self) -> None:
        """Close at once. Idempotent."""
        self.lost = None
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self.loop = transport, asyncio.get_running_loop()
        self._client._open.add(self)

    def data_received(self, data: bytes) -> None:
        self._bodiless += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._break(f"no HTTP: {error}")
            return
        if self._bodiless > MOST_HEAD:
            self._break(f"more than {MOST_HEAD} bytes of heads and framing")

    def connection_lost(self, error: Exception | None) -> None:
        self._client._open.discard(self)
        self._break(str(error) if error else "it closed the connection")

    def on_message_begin(self) -> None:
        if self._reply is None:  # nothing was asked: the next call would take it for its reply
            self._transport.abort()

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"retry-after":
            self._retry_after = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        if self.lost is not None and self._parser.get_status_code() == 200:
            self._answer()  # a stream that has no end: the reply is its head

    def on_body(self, data: bytes) -> None:
        self._bodiless = 0
        if self.sink is not None and self._parser.get_status_code() == 200:
            self.sink(data)
        elif len(self._body) + len(data) > self._most:
            self._break(f"a reply of more than {self._most} bytes")
        elif not self._body:
            self._body = data
        else:  # many small pieces would take far more memory one by one
            if isinstance(self._body, bytes):
                self._body = bytearray(self._body)
            self._body += data

    def on_message_complete(self) -> None:
        if self._reply is None:
            self._break("the stream ended")
            return
        self._answer()
        if not self._parser.should_keep_alive():
            self._transport.abort()

    def _answer(self) -> None:
        reply, self._reply = self._reply, None
        body = bytes(self._body)
        if reply is not None and not reply.done():
            reply.set_result(Reply(self._parser.get_status_code(), self._retry_after, body))
        self._retry_after, self._body, self._bodiless = None, b"", 0

    def _break(self, why: str) -> None:
        reply, self._reply = self._reply, None
        lost, self.lost = self.lost, None
        self._body = b""
        error = EngineUnreachable(f"{self._client.url}: {why}")
        if reply is not None and not reply.done():
            reply.set_exception(error)
        elif lost is not None:
            lost(error)
        self._transport.abort()
