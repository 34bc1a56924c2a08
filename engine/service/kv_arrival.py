"""The wait of `start_generate` for its KV: one poller for all who wait, however many they are."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import numpy as np

from engine.protocol import KVIncomplete
from engine.scheduling.jobs import Generation
from kvcache.cache import KVCache
from kvcache.lease.table import ReceiveLease
from kvcache.types import LeaseId

__all__ = ["KVArrivals"]

POLL_S = 0.001  # how often the watermarks are looked at while somebody waits
FENCE_AFTER_S = 0.05  # a live sender lets go within microseconds of its last byte


@dataclass(slots=True, eq=False)
class Waiter:
    """Somebody who sleeps until `lease` has `wanted` tokens, or has ended."""

    lease: ReceiveLease
    wanted: int
    woken: asyncio.Future[None]


class Watched:
    """Some waiters, and where their watermarks stand."""

    def __init__(self, cache: KVCache, waiters: list[Waiter]) -> None:
        self._waiters = waiters
        self._wanted = np.array([waiter.wanted for waiter in waiters], dtype=np.uint64)
        self._watch = cache.watch([waiter.lease for waiter in waiters])

    def due(self) -> list[Waiter]:
        """Those whose tokens have landed, or whose lease has ended."""
        landed, live = self._watch.read()
        return [self._waiters[i] for i in np.flatnonzero(~live | (landed >= self._wanted))]


class KVArrivals:
    """Turns leases into sequences once their KV has landed. Lives on one asyncio event loop.

    A timer, which runs only while somebody waits, reads all watermarks that are waited for in one
    numpy operation and wakes those whose time has come.
    """

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._waiters: set[Waiter] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._watched: Watched | None = None  # made anew when waiters come and go

    async def start(self, generation: Generation, lease_id: LeaseId, begin: int | None) -> None:
        """Give `generation` the sequence of a lease: wait for `begin` tokens to land, as long as
        the lease lives, and then for the sender to let go; one that does not, because it was
        stopped, is left behind.

        Cancelled, it leaves the lease as it is. Raises `LeaseExpired`, `UnknownLease`, and what
        else `KVCache.start_lease` says.
        """
        landed_at: float | None = None
        while True:
            lease = self._cache.lease(lease_id)
            wanted = min(begin or 0, lease.room)
            if lease.landed >= wanted:
                now = time.monotonic()
                landed_at = landed_at or now
                try:
                    generation.cached = self._cache.start_lease(
                        lease_id,
                        generation.seq_id,
                        generation.tokens,
                        begin,
                        fence=now - landed_at > FENCE_AFTER_S,
                    )
                except KVIncomplete:
                    pass  # the sender is about to let go
                else:
                    generation.begin = generation.cached
                    generation.started = True
                    return
            await self._sleep(lease, wanted)

    async def _sleep(self, lease: ReceiveLease, wanted: int) -> None:
        """Until the lease has `wanted` tokens or has ended; `POLL_S` at least."""
        loop = asyncio.get_running_loop()
        waiter = Waiter(lease, wanted, loop.create_future())
        self._waiters.add(waiter)
        self._watched = None
        if self._timer is None:
            self._timer = loop.call_later(POLL_S, self._poll)
        try:
            await waiter.woken
        finally:
            self._waiters.discard(waiter)
            self._watched = None

    def _poll(self) -> None:
        self._timer = None
        if not self._waiters:
            return
        if self._watched is None:
            self._watched = Watched(self._cache, list(self._waiters))
        for waiter in self._watched.due():
            if not waiter.woken.done():
                waiter.woken.set_result(None)
        self._timer = asyncio.get_running_loop().call_later(POLL_S, self._poll)
