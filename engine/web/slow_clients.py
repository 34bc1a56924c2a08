"""Drops clients that do not read their responses, or do not complete a request's head.

A client that does not read costs little memory: its request's task waits once 64 KiB are buffered.
But the request would hold pages on an engine without a time limit. A task checks all connections
periodically, so that writing a token costs nothing more.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Collection, Iterable
from typing import Any

from engine.web.protocol import BoundedHttpProtocol

__all__ = ["SlowClients"]

log = logging.getLogger(__name__)
CHECKS = 4  # per time limit


class SlowClients:
    """Watches the connections of a server.

    A connection is aborted, which cancels its request, if its number of unread bytes has not
    changed for `stall_s` seconds, or if a request's head is not complete `head_s` seconds after the
    connection was opened or the head began.
    """

    def __init__(
        self, dropped: Callable[[str], None], *, head_s: float, stall_s: float = math.inf
    ) -> None:
        """`dropped` is called with the reason, `unread` or `no_request`."""
        self._dropped = dropped
        self._stall_s = stall_s
        self._head_s = head_s
        self._unread: dict[
            BoundedHttpProtocol, tuple[int, float]
        ] = {}  # bytes, and since when so many

    async def watch(self, connections: Collection[Any]) -> None:
        """Check `connections`, which are `BoundedHttpProtocol`s, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(min(self._stall_s, self._head_s) / CHECKS)
            self.check(list(connections), loop.time())

    def check(self, connections: Iterable[BoundedHttpProtocol], now: float) -> None:
        """Drop the connections that are too slow at `now` (loop time)."""
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
                    since = now  # growth counts as progress: it ends at the limit
                self._unread[connection] = (unread, since)
                if now - since >= self._stall_s:
                    self._drop(connection, "unread")

    def _drop(self, connection: BoundedHttpProtocol, reason: str) -> None:
        peer = connection.transport.get_extra_info("peername")
        log.info("a client at %s is dropped: %s", peer, reason)
        self._dropped(reason)
        connection.transport.abort()
