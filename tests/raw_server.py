"""A server that answers every request with the same bytes, whether they are HTTP or not."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

__all__ = ["HEAD", "RawServer"]

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


class RawServer:
    """Answers with `first`, then with `again` for ever, every `every_s` seconds. None: it closes.

    `heads` are the heads of the requests. `url` is set in `serving`.
    """

    def __init__(self, first: bytes, again: bytes | None = b"", *, every_s: float = 0.0) -> None:
        self.url = ""
        self.heads: list[bytes] = []
        self._first = first
        self._again = again
        self._every_s = every_s
        self._tasks: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[RawServer]:
        """Listen while the body runs."""
        server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                head = await reader.readuntil(b"\r\n\r\n")
                if (size := re.search(rb"(?i)content-length: *(\d+)", head)) is not None:
                    await reader.readexactly(int(size[1]))  # unread, it would reset the connection
                self.heads.append(head)
                writer.write(self._first)
                await writer.drain()
                while self._again is not None and not writer.is_closing():
                    await asyncio.sleep(self._every_s)
                    writer.write(self._again)
                    await writer.drain()
        finally:
            writer.close()
