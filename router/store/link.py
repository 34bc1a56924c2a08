"""Calls in both directions over one Unix socket, between a parent and a worker process.

Each frame is its length (4 bytes, big endian) and msgpack: `[0, id, operation, arguments]` for a
call, `[1, id, result]` or `[2, id, message]` for its end, `[3, operation]` for a notice.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from router.base import StoreUnavailable

__all__ = ["CALL_S", "Link"]

log = logging.getLogger(__name__)

MOST_FRAME = 64 << 20  # bytes
CALL_S = 5.0  # longest time of a call
CALLS = 1024  # of the other side that may be under way
_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(list[Any]).decode

Handler = Callable[..., Awaitable[Any]]


class Link:
    """One end. `run` serves the other end's calls by `handlers`, until it closes the socket."""

    def __init__(
        self,
        own: socket.socket,
        handlers: dict[str, Handler],
        notices: dict[str, Callable[[], None]],
    ) -> None:
        self._socket = own
        self._handlers = handlers
        self._notices = notices
        self._ids = itertools.count()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._opened = asyncio.Event()
        self._room = asyncio.Semaphore(CALLS)
        self.closed = False

    async def run(self) -> None:
        """Serve until the other end is gone, or until cancelled. Then calls fail."""
        reader, self._writer = await asyncio.open_unix_connection(sock=self._socket)
        self._opened.set()
        try:
            async with asyncio.TaskGroup() as tasks:
                try:
                    while True:
                        size = int.from_bytes(await reader.readexactly(4), "big")
                        if size > MOST_FRAME:
                            log.error("a frame of %d bytes came from a process of ours", size)
                            break
                        await self._received(_unpack(await reader.readexactly(size)), tasks)
                except (asyncio.IncompleteReadError, ConnectionError):
                    pass
                finally:
                    self.close()
        finally:
            self.close()

    async def call(self, operation: str, *arguments: Any, timeout_s: float = CALL_S) -> Any:
        """Call the other end; return its result in builtin types.

        Raises `StoreUnavailable` if the other end fails, is gone, or takes longer.
        """
        await self._opened.wait()
        if self.closed:
            raise StoreUnavailable("the parent process of the workers is gone")
        id = next(self._ids)
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[id] = reply
        try:
            self._send([0, id, operation, arguments])
            async with asyncio.timeout(timeout_s):
                return await reply
        except TimeoutError:
            message = f"no answer to {operation} within {timeout_s:g} s"
            raise StoreUnavailable(message) from None
        finally:
            self._calls.pop(id, None)

    def notify(self, operation: str) -> None:
        """Send a notice, if the other end is there."""
        if not self.closed and self._opened.is_set():
            self._send([3, operation])

    def close(self) -> None:
        """Close the socket; calls under way fail."""
        self.closed = True
        self._opened.set()
        if self._writer is not None:
            self._writer.close()
        else:
            self._socket.close()
        for reply in self._calls.values():
            if not reply.done():
                reply.set_exception(StoreUnavailable("the other process is gone"))

    def _send(self, frame: list[Any]) -> None:
        if self._writer is not None and not self.closed:
            data = _pack(frame)
            self._writer.write(len(data).to_bytes(4, "big") + data)

    async def _received(self, frame: list[Any], tasks: asyncio.TaskGroup) -> None:
        kind, *rest = frame
        if kind == 0:
            await self._room.acquire()
            tasks.create_task(self._serve(*rest))
        elif kind == 3:
            if notice := self._notices.get(rest[0]):
                notice()
        else:
            id, result = rest
            reply = self._calls.get(id)
            if reply is None or reply.done():
                return
            if kind == 1:
                reply.set_result(result)
            else:
                reply.set_exception(StoreUnavailable(result))

    async def _serve(self, id: int, operation: str, arguments: list[Any]) -> None:
        try:
            self._send([1, id, await self._handlers[operation](*arguments)])
        except Exception as error:
            log.exception("the call %s of another process failed", operation)
            self._send([2, id, f"{operation}: {error!r}"])
        finally:
            self._room.release()
