"""The wait of `start_generate` for its KV, with one poller for all waiting calls."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import numpy as np

from engine.protocol import KVIncomplete
from engine.scheduling import Generation
from kvcache.cache import KVCache
from kvcache.lease import ReceiveLease
from kvcache.types import LeaseId

__all__ = ["KVArrivals"]

POLL_S = 0.001  # how often the watermarks are read while calls wait
FENCE_AFTER_S = 0.05  # a live sender releases the lease within microseconds of its last byte


@dataclass(slots=True, eq=False)
class Waiter:
    """A call that sleeps until `lease` has `wanted` tokens or has ended."""

    lease: ReceiveLease
    wanted: int
    woken: asyncio.Future[None]


class WaiterGroup:
    """A fixed set of waiters and a view of their leases' watermarks."""

    def __init__(self, cache: KVCache, waiters: list[Waiter]) -> None:
        self._waiters = waiters
        self._wanted = np.array([waiter.wanted for waiter in waiters], dtype=np.uint64)
        self._watch = cache.watch([waiter.lease for waiter in waiters])

    def due(self) -> list[Waiter]:
        """Return the waiters whose tokens have landed or whose lease has ended."""
        landed, live = self._watch.read()
        return [self._waiters[i] for i in np.flatnonzero(~live | (landed >= self._wanted))]


class KVArrivals:
    """Turns leases into sequences once their KV has landed. Lives on one asyncio event loop.

    While calls wait, a timer reads all their watermarks in one numpy operation and wakes the calls
    whose KV has landed or whose lease has ended.
    """

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._waiters: set[Waiter] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._group: WaiterGroup | None = None  # None: none, or waiters have come or gone since

    async def start(self, generation: Generation, lease_id: LeaseId, begin: int | None) -> None:
        """Give the sequence of a lease to `generation`, once `begin` tokens have landed.

        Then waits for the sender to release the lease; a sender that does not within
        `FENCE_AFTER_S`, because it is stopped, is fenced off. Cancellation leaves the lease as it
        is. Raises `LeaseExpired`, `UnknownLease`, and the other errors of `KVCache.start_lease`.
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
                    pass  # the sender is about to release the lease
                else:
                    generation.begin = generation.cached
                    generation.started = True
                    return
            await self._sleep(lease, wanted)

    async def _sleep(self, lease: ReceiveLease, wanted: int) -> None:
        """Sleep until the lease has `wanted` tokens or has ended, and at least for `POLL_S`."""
        loop = asyncio.get_running_loop()
        waiter = Waiter(lease, wanted, loop.create_future())
        self._waiters.add(waiter)
        self._group = None
        if self._timer is None:
            self._timer = loop.call_later(POLL_S, self._poll)
        try:
            await waiter.woken
        finally:
            self._waiters.discard(waiter)
            self._group = None

    def _poll(self) -> None:
        self._timer = None
        if not self._waiters:
            return
        if self._group is None:
            self._group = WaiterGroup(self._cache, list(self._waiters))
        for waiter in self._group.due():
            if not waiter.woken.done():
                waiter.woken.set_result(None)
        self._timer = asyncio.get_running_loop().call_later(POLL_S, self._poll)
