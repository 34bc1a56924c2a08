"""The wait of a virtual `start_generate` for its KV."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from engine.scheduling import Generation
from engine.virtual.cache import VirtualCache
from kvcache.types import LeaseId

__all__ = ["VirtualArrivals"]


class VirtualArrivals:
    """Turns leases into sequences once their KV has landed, as `engine.service.kv_arrival` does."""

    def __init__(self, cache: VirtualCache, before_start: Callable[[], object]) -> None:
        """`before_start` is called before pages change hands."""
        self._cache = cache
        self._before_start = before_start
        # A set would have another order in each process.
        self._waiters: dict[asyncio.Future[None], None] = {}
        self._failure: Exception | None = None

    async def start(self, generation: Generation, lease_id: LeaseId, begin: int | None) -> None:
        """Give the sequence of a lease to `generation`, once `begin` tokens have landed.

        Raises as `KVCache.start_lease`, and the error of `fail`.
        """
        while True:
            if self._failure is not None:
                raise self._failure
            lease = self._cache.lease(lease_id)
            if lease.landed >= min(begin or 0, lease.room):
                break
            landed = asyncio.get_running_loop().create_future()
            self._waiters[landed] = None
            try:
                await landed
            finally:
                self._waiters.pop(landed, None)
        self._before_start()
        generation.cached = self._cache.start_lease(
            lease_id, generation.seq_id, generation.tokens, begin
        )
        generation.begin = generation.cached
        generation.started = True

    def look(self) -> None:
        """Let those that wait look again: some KV has landed, or a lease has ended."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    def fail(self, failure: Exception) -> None:
        """Fail all waits, now and from now on: the engine has died."""
        self._failure = failure
        self.look()
