"""Clients that do not read their answers, or do not say what they want, are dropped.

What a client does not read is bounded: 64 KiB here (aiohttp stops its handler then, and with it
the stream of its request) and what the kernel buffers. But its request holds pages on an engine for
as long as it likes. So the connections are looked at now and then, off the path of the tokens.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass

from aiohttp import web

from router.metrics import Metrics

__all__ = ["SlowClients"]

log = logging.getLogger(__name__)
LOOKS = 4  # in the time that a client has


@dataclass(slots=True)
class _Seen:
    unread: int  # bytes that wait to be sent
    since: float  # the last time that anything moved
    asked: bool  # it has sent a whole request head, ever


class SlowClients:
    """Watches the connections of a server. One whose unread bytes have not changed in number for
    `stall_s` seconds is aborted, which cancels its request; so is one from which no whole head of a
    request has come `head_s` seconds after it was opened."""

    def __init__(self, metrics: Metrics, *, stall_s: float, head_s: float) -> None:
        self._metrics = metrics
        self._stall_s = stall_s
        self._head_s = head_s
        self._seen: dict[web.RequestHandler, _Seen] = {}

    async def watch(self, server: web.Server) -> None:
        """Until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(min(self._stall_s, self._head_s) / LOOKS)
            self.look(server.connections, loop.time())

    def look(self, connections: Iterable[web.RequestHandler], now: float) -> None:
        """Drop those of `connections` that are too slow at `now` (seconds)."""
        before, self._seen = self._seen, {}
        for connection in connections:
            transport = connection.transport
            if transport is None or transport.is_closing():
                continue
            unread = transport.get_write_buffer_size()
            seen = before.get(connection)
            if seen is None:
                seen = _Seen(unread, now, False)
            seen.asked = seen.asked or _has_asked(connection)
            if seen.asked and (not unread or unread != seen.unread):
                seen.since = now  # growing is moving too: it stops at the limit
            seen.unread = unread
            self._seen[connection] = seen
            still = now - seen.since
            if unread and still >= self._stall_s:
                self._drop(transport, "unread")
            elif not seen.asked and still >= self._head_s:
                self._drop(transport, "no_request")

    def _drop(self, transport: asyncio.Transport, reason: str) -> None:
        log.info("a client at %s is dropped: %s", transport.get_extra_info("peername"), reason)
        self._metrics.slow_clients.labels(reason).inc()
        transport.abort()


def _has_asked(connection: web.RequestHandler) -> bool:
    # aiohttp offers no other way to tell: a head that is not complete is in its parser.
    return bool(connection._request_count)
