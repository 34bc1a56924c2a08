"""A load generator with little CPU cost: HTTP/1.1 on persistent connections.

It parses just enough of HTTP to find the end of an answer, because it takes CPU time from the
server under test. One connection carries one request at a time, as in a client's pool.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

__all__ = ["Answer", "Connection", "closed_loop", "connected", "open_loop", "post"]

LAST_CHUNK = b"0\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer. Times are seconds since the request was due."""

    status: int
    first_byte_s: float  # of the body
    total_s: float
    body: bytes  # as received: a chunked body includes the chunk sizes


class Connection(asyncio.Protocol):
    """One connection to a server. Raises `ConnectionError` if it is lost within an answer."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[Answer] | None = None
        self._due = 0.0
        self._reset()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it

    async def ask(self, request: bytes, *, due: float | None = None) -> Answer:
        """Send a request and wait for the end of its answer.

        `due` is when it should have been sent (`time.perf_counter`), by default now.
        """
        if self._transport is None or self._transport.is_closing():
            raise ConnectionError("the server has closed the connection")
        self._done = asyncio.get_running_loop().create_future()
        self._due = time.perf_counter() if due is None else due
        self._reset()
        self._transport.write(request)
        return await self._done

    @property
    def begun(self) -> bool:
        """Return whether the body of the answer has begun to arrive."""
        return bool(self._body)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._done is None or self._done.done():
            return
        if not self._in_body:
            self._head += data
            head, end, data = self._head.partition(b"\r\n\r\n")
            if not end:
                return
            self._read_head(head)
        if data:
            if not self._body:
                self._first = time.perf_counter() - self._due
            self._body.append(data)
            self._size += len(data)
        if self._length is None:
            tail = data if len(data) >= len(LAST_CHUNK) else b"".join(self._body[-5:])
            if not tail.endswith(LAST_CHUNK):
                return
        elif self._size < self._length:
            return
        total = time.perf_counter() - self._due
        self._done.set_result(Answer(self._status, self._first, total, b"".join(self._body)))

    def connection_lost(self, error: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(ConnectionError(f"connection lost in an answer: {error}"))

    def _reset(self) -> None:
        self._head = b""
        self._in_body = False
        self._status = 0
        self._length: int | None = None  # None: in chunks
        self._first = 0.0
        self._body: list[bytes] = []
        self._size = 0

    def _read_head(self, head: bytes) -> None:
        lines = head.split(b"\r\n")
        self._status = int(lines[0].split()[1])
        for line in lines[1:]:
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                self._length = int(value)
        self._in_body = True


def post(url: str, path: str, body: bytes, **headers: str) -> bytes:
    """Return the bytes of a request."""
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\n{lines}"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


@contextmanager
def _closing(connections: Sequence[Connection]) -> Iterator[None]:
    try:
        yield
    finally:
        for connection in connections:
            connection.close()


async def connected(url: str, count: int) -> list[Connection]:
    """Open `count` connections to the server at `url`."""
    loop, parts = asyncio.get_running_loop(), urlsplit(url)
    return [
        (await loop.create_connection(Connection, parts.hostname, parts.port))[1]
        for _ in range(count)
    ]


async def closed_loop(
    url: str, requests: Callable[[int], bytes], *, count: int, connections: int
) -> list[Answer]:
    """Send the requests `requests(0)` to `requests(count - 1)`; each connection always has one."""
    pool = await connected(url, connections)
    numbers = iter(range(count))
    answers: list[Answer] = []

    async def work(connection: Connection) -> None:
        for number in numbers:
            answers.append(await connection.ask(requests(number)))

    with _closing(pool):
        async with asyncio.TaskGroup() as tasks:
            for connection in pool:
                tasks.create_task(work(connection))
    return answers


async def open_loop(
    url: str, requests: Callable[[int], bytes], *, count: int, connections: int, per_s: float
) -> list[Answer]:
    """Send `count` requests at a fixed rate over the connections in rotation.

    A request whose connection is busy waits for it; the wait counts.
    """
    pool = await connected(url, connections)
    answers: list[Answer] = []
    began = time.perf_counter() + 0.05

    async def work(connection: Connection, first: int) -> None:
        for number in range(first, count, connections):
            due = began + number / per_s
            await asyncio.sleep(due - time.perf_counter())
            answers.append(await connection.ask(requests(number), due=due))

    with _closing(pool):
        async with asyncio.TaskGroup() as tasks:
            for index, connection in enumerate(pool):
                tasks.create_task(work(connection, index))
    return answers
