"""Clients that do not read their answers, or do not say what they want, are dropped.

What a client does not read is bounded: 64 KiB here (its handler waits then, and with it the stream
of its request) and what the kernel buffers. But its request holds pages on an engine for as long as
it likes. So the connections are looked at now and then, off the path of the tokens.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable

from router.api.protocol import BoundedHttpProtocol
from router.telemetry.metrics import Metrics

__all__ = ["SlowClients"]

log = logging.getLogger(__name__)
LOOKS = 4  # in the time that a client has


class SlowClients:
    """Watches the connections of a server. One whose unread bytes have not changed in number for
    `stall_s` seconds is aborted, which cancels its request; so is one from which no whole head of a
    request has come `head_s` seconds after it was opened, or began with one. One that has been
    served, and asks for nothing more, is closed."""

    def __init__(self, metrics: Metrics, *, stall_s: float, head_s: float) -> None:
        self._metrics = metrics
        self._stall_s = stall_s
        self._head_s = head_s
        self._unread: dict[
            BoundedHttpProtocol, tuple[int, float]
        ] = {}  # bytes, and since when so many

    async def watch(self, connections: Collection[BoundedHttpProtocol]) -> None:
        """Until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(min(self._stall_s, self._head_s) / LOOKS)
            self.look(list(connections), loop.time())

    def look(self, connections: Iterable[BoundedHttpProtocol], now: float) -> None:
        """Drop those of `connections` that are too slow at `now` (seconds)."""
        before, self._unread = self._unread, {}
        for connection in connections:
            transport, since = connection.transport, connection.waiting_since
            if transport.is_closing() and not transport.get_write_buffer_size():
                continue
            if since is not None and now - since >= self._head_s:
                self._drop(connection, "no_request")
            elif unread := transport.get_write_buffer_size():
                seen, since = before.get(connection, (-1, now))
                if seen != unread:
                    since = now  # growing is moving too: it stops at the limit
                self._unread[connection] = (unread, since)
                if now - since >= self._stall_s:
                    self._drop(connection, "unread")

    def _drop(self, connection: BoundedHttpProtocol, reason: str) -> None:
        peer = connection.transport.get_extra_info("peername")
        log.info("a client at %s is dropped: %s", peer, reason)
        self._metrics.slow_clients.labels(reason).inc()
        connection.transport.abort()
