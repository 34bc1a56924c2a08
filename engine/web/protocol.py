"""uvicorn's HTTP/1.1 protocol with limits.

uvicorn parses everything that arrives, and waits for its client without a time limit. The subclass
here adds:

- Requests pipelined behind a running one stay unparsed bytes, and their number is bounded.
- Bytes that wait to be parsed, bodies above all, count towards a budget of the whole process.
- Heads are bounded. Heads that llhttp accepts and HTTP forbids are refused.
- A refusal waits its turn behind earlier responses.
- A request with an `Upgrade` header is served as HTTP/1.1, with its body.
- A disconnect cancels the running request.
- Responses to HTTP/1.0 are not chunked.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import httptools
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from engine.web.bodies import BodyBudget

__all__ = ["BoundedHttpProtocol"]

KEEPALIVE_S = 75  # for idle connections
MAX_HEADERS = 128
MAX_FIELD = 8190  # bytes of one header, or of the target
TOO_LONG = "the request line or a header is too long"
MAX_UNPARSED = 1 << 16  # bytes that the parser may take without completing a head or a chunk
MAX_WAITING = 1 << 16  # bytes behind a running request; what one read brings may exceed it
SLICE = 1 << 12  # bytes parsed at once, so that few requests are parsed before they may run
# Stands for input that is not a request. Its body never arrives.
_PLACEHOLDER = b"GET / HTTP/1.1\r\nHost: -\r\nContent-Length: 1\r\n\r\n"
Headers = list[tuple[bytes, bytes]]


class _Flow(FlowControl):
    """Keeps reading paused while too many bytes wait behind a running request."""

    held = False

    def resume_reading(self) -> None:
        if self.read_paused and not self.held:
            super().resume_reading()


class BoundedHttpProtocol(HttpToolsProtocol):
    """One client's connection.

    `waiting_since` (loop time) is set while the connection owes a request's head. The watcher of
    slow clients reads it.
    """

    flow: _Flow

    def __init__(self, *args: Any, budget: BodyBudget, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._budget = budget
        self._held = 0  # bytes of bodies that are counted in the budget
        self.headers = []
        self.timeout_keep_alive = KEEPALIVE_S
        self.waiting_since: float | None = self.loop.time()
        self.gone = False  # the client has disconnected, or is aborted
        self._discarding = False  # input is dropped unparsed
        self._cycles: deque[RequestResponseCycle] = deque()  # not yet answered; the first one runs
        self._task: asyncio.Task[Any] | None = None
        self._waiting = bytearray()  # received behind a running request
        self._unread = False  # the next request starts once the client has read the response
        self._unparsed = 0  # bytes since the parser last completed something
        self._body_left = 0  # bytes of a body that llhttp takes for another protocol

    # The connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _Flow(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disconnected()
        if self._task is not None and self._cycles and not self._cycles[0].response_complete:
            self._task.cancel()
        self._drop_waiting()
        self._budget.give(self._held)
        self._held = 0
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def _disconnected(self) -> None:
        self.gone = True
        for cycle in self._cycles:
            cycle.disconnected = True
            cycle.message_event.set()

    @property
    def arrived(self) -> bool:
        """Whether the whole body of the running request has arrived."""
        return not self._cycles[0].more_body

    def cancels(self, task: asyncio.Task[Any] | None) -> None:
        """Cancel `task` when the client disconnects, until another call replaces it."""
        self._task = task

    def release_body(self) -> None:
        """Count the body of the running request no longer: it has been parsed."""
        if self._held:
            behind = 0
            if len(self._cycles) > 1:
                behind = sum(len(c.body) for c in self._cycles if c is not self._cycles[0])
            self._budget.give(self._held - behind)
            self._held = behind

    def abort(self) -> None:
        """Close at once and discard what the client has not read."""
        self._disconnected()
        self.transport.abort()

    def half_close(self) -> None:
        """Send the end of the stream after what was written, but still receive."""
        self._discarding = True
        self.release_body()
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def shutdown(self) -> None:
        """Close after the running response; nothing that waits behind it is started."""
        for cycle in self._cycles:
            cycle.keep_alive = False
        if not self._cycles or self._unread:
            self.transport.close()

    # Parsing

    def data_received(self, data: bytes) -> None:
        if self._discarding:
            return
        self._unset_keepalive_if_required()
        if self._body_left:
            self._take_body(data)
        elif self._cycles and not self.cycle.more_body:
            self._wait(data)
        else:
            self._parse(data)

    def _wait(self, data: bytes) -> None:
        if not self._budget.take(len(data)):
            self._drop_waiting()
            self._refuse(overloaded=True)
            return
        self._waiting += data
        if len(self._waiting) > MAX_WAITING:
            self.flow.pause_reading()
            self.flow.held = True

    def _drop_waiting(self) -> None:
        self._budget.give(len(self._waiting))
        self._waiting = bytearray()

    def _parse(self, data: bytes) -> None:
        at, size = 0, len(data)
        try:
            while at < size:
                piece = data[at : at + SLICE]
                length = len(piece)
                at += length
                self._unparsed += length
                self.parser.feed_data(piece)
                if self._discarding:
                    return
                if self._unparsed > MAX_UNPARSED or len(self.headers) > MAX_HEADERS:
                    self._refuse(broken="a head or a line is too long")
                    return
                if at < size and self._cycles and not self.cycle.more_body:
                    self._wait(data[at:])
                    break
        except httptools.HttpParserUpgrade as upgrade:
            # The request is served as any other, and the connection is closed after it.
            self._take_body(data[at - length + upgrade.args[0] :])
            return
        except httptools.HttpParserError as error:
            self._refuse(broken=str(error.__context__ or error))
            return
        if not self._cycles:
            if self.waiting_since is None:
                self.waiting_since = self.loop.time()  # empty lines before a head count for it
        elif self.pipeline and len(self.cycle.body) <= HIGH_WATER_LIMIT:
            self.flow.resume_reading()  # a disconnect is noticed only while reading

    def _take_body(self, data: bytes) -> None:
        """Pass on the body of a request whose `Upgrade` is ignored."""
        if body := data[: self._body_left]:
            self.on_body(body)
            self._body_left -= len(body)
        if not self._body_left:
            self._discarding = True
            super().on_message_complete()

    def _refuse(self, **state: Any) -> None:
        """Answer with an error in turn, and close. `state` tells the application which error.

        The request that is being received gets the answer. Between requests, a placeholder does.
        """
        self._discarding = True
        if not self._cycles or not self.cycle.more_body:
            self.parser = httptools.HttpRequestParser(self)
            self.parser.feed_data(_PLACEHOLDER)
        self.cycle.scope["state"].update(state)
        self.cycle.message_event.set()

    # What the parser calls

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._unparsed = 0
        self.scope["state"]["connection"] = self
        if not self._cycles:
            self.waiting_since = self.loop.time()

    def on_headers_complete(self) -> None:
        self._unparsed = 0
        self.waiting_since = None
        if not self.url.startswith(b"/"):
            self.url = _path(self.url)
        version, upgrade = self.parser.get_http_version(), self.parser.should_upgrade()
        _check_head(version, self.url, self.headers, upgrade=upgrade)
        if version == "1.0":
            self.expect_100_continue = False
        super().on_headers_complete()
        self._cycles.append(self.cycle)
        self.headers = []  # trailers must not join the request's headers
        if version == "1.0":
            _never_chunk(self.cycle)
        if upgrade:
            self.cycle.keep_alive = False
            lengths = [value for name, value in self.scope["headers"] if name == b"content-length"]
            self._body_left = int(lengths[0]) if lengths else 0

    def on_body(self, body: bytes) -> None:
        self._unparsed = 0
        if self.cycle.response_complete:
            return
        size = len(body)
        if self._budget.take(size):
            self._held += size
            super().on_body(body)
            return
        # What a running request has received already is freed when its task wakes.
        freed = self._held if self.cycle is self._cycles[0] else len(self.cycle.body)
        self._budget.give(freed)
        self._held -= freed
        self.cycle.body, self.cycle.keep_alive = bytearray(), False
        self._refuse(overloaded=True)

    def on_message_complete(self) -> None:
        if not self._body_left:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        self._unread = self.flow.write_paused
        if not self._unread:
            self._next()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread:
            self._unread = False
            self._next()

    def _next(self) -> None:
        """Start the next request: the running one has been answered."""
        self.release_body()
        self._cycles.popleft()
        self._task = None  # the rest of its work does not need the client
        super().on_response_complete()
        if self._waiting and not self._cycles and not self.transport.is_closing():
            data = bytes(self._waiting)
            self._drop_waiting()
            self.flow.held = False
            self.data_received(data)
            self.flow.resume_reading()


def _path(target: bytes) -> bytes:
    """Return path and query of a target that is a whole URL, or `*` (the server itself)."""
    if target == b"*":
        return b"/"
    url = httptools.parse_url(target)
    return (url.path or b"/") + (b"?" + url.query if url.query else b"")


def _check_head(version: str, target: bytes, headers: Headers, *, upgrade: bool) -> None:
    """Check rules of RFC 9112, §3.2 and §6.1, that llhttp does not, and our limits.

    Raises `ValueError`.
    """
    if len(headers) > MAX_HEADERS:
        raise ValueError("there are too many headers")
    if len(target) > MAX_FIELD:
        raise ValueError(TOO_LONG)
    hosts, codings = 0, []
    for name, value in headers:
        if len(name) + len(value) > MAX_FIELD:
            raise ValueError(TOO_LONG)
        if name == b"host":
            hosts += 1
        elif name == b"transfer-encoding":
            codings.append(value.lower())
    if version not in ("1.0", "1.1"):
        raise ValueError(f"HTTP/{version} is not supported")
    if hosts > 1 or (version == "1.1" and not hosts):
        raise ValueError(f"there are {hosts} Host headers instead of one")
    if codings and (codings != [b"chunked"] or version == "1.0" or upgrade):
        coding = b", ".join(codings).decode("latin-1")
        raise ValueError(f"the transfer coding {coding!r} is not supported here")


def _never_chunk(cycle: RequestResponseCycle) -> None:
    """Send the response of `cycle` without chunks, which HTTP/1.0 lacks.

    Closing the connection ends a stream.
    """
    send, cycle.chunked_encoding = cycle.send, False

    async def send_whole(message: Any) -> None:
        if message["type"] == "http.response.body":
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = send_whole  # type: ignore[method-assign]
