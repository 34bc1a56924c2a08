"""Server-sent events to one client, in as few steps from a token to the socket as there can be."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.client_exceptions import ClientConnectionResetError

__all__ = ["EventWriter"]

UNREAD = 1 << 16  # bytes after which a client has to read before it is sent more
HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


class EventWriter:
    """A response that begins with its first event.

    aiohttp's own `write` is meant for everything: it is a coroutine of four layers for each token.
    Here only the first and the last event take that way; the others go to the transport, each with
    the size that makes it a chunk of HTTP/1.1.
    """

    def __init__(self, http: web.Request, headers: Mapping[str, str]) -> None:
        self.response = web.StreamResponse(headers={**HEADERS, **headers})
        self._http = http
        self._writer: AbstractStreamWriter | None = None
        self._written = 0  # bytes since the client was last waited for

    def write(self, data: bytes) -> Awaitable[None] | None:
        """Send whole events. What is returned is to be awaited: None, if there is nothing to wait
        for. Raises `ConnectionResetError` if the client is gone."""
        writer = self._writer
        if writer is None:
            return self._begin(data)
        transport = writer.transport
        if transport is None or transport.is_closing():
            raise ClientConnectionResetError("the client has gone")
        transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        self._written += len(data)
        if self._written < UNREAD:
            return None
        self._written = 0
        return writer.drain()

    async def end(self, data: bytes = b"") -> None:
        """Send the last events, and that there are no more."""
        if not self.response.prepared:
            await self.response.prepare(self._http)
        await self.response.write_eof(data)

    async def _begin(self, data: bytes) -> None:
        writer = await self.response.prepare(self._http)
        await self.response.write(data)  # and the headers before it
        if self.response.chunked:  # HTTP/1.0 has no chunks
            self._writer = writer
