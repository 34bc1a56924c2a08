"""Limits of API keys that hold over all routers of a store."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable

from router.admission import Key, RateLimits
from router.base import StoreUnavailable
from router.store import Bucket, SharedStore, Take

__all__ = ["SharedLimits"]

log = logging.getLogger(__name__)

ALWAYS = -1e18  # a level that every bucket has
TAKE_S = 1.0  # that a request waits for the store
AGAIN_S = 1.0  # for which the store is not asked after it took longer


class SharedLimits(RateLimits):
    """The buckets are in the store: one call for each request whose key has limits.

    What is here is what they held at the latest call, for the headers of responses. While the store
    is lost, this router admits its share: the limits divided by the number of routers that were
    there. These buckets begin full, so a key may use up to a minute's worth more then. A store that
    takes longer than `TAKE_S` counts as lost for `AGAIN_S`.
    """

    def __init__(
        self,
        requests_per_minute: int,
        tokens_per_minute: int,
        clock: Callable[[], float],
        *,
        store: SharedStore,
        routers: Callable[[], int],
        tasks: asyncio.TaskGroup,
    ) -> None:
        """`routers` returns how many there are; `tasks` runs the calls that nobody waits for."""
        super().__init__(requests_per_minute, tokens_per_minute, clock)
        self._store = store
        self._routers = routers
        self._tasks = tasks
        self._share: RateLimits | None = None  # its buckets fill while the store is there, too
        self._lost = False
        self._ask_at = 0.0  # not before
        self._owed: Counter[Key] = Counter()  # tokens that the store has not been told of
        self._charging: asyncio.Task[None] | None = None

    async def arrive(self, key: Key) -> None:
        """Count a request. Raises `RateLimited`, with the time to wait, if it exceeds a limit."""
        if not self._limits(key):
            return
        allowance = self._allowance(key)
        limited = allowance.limited()
        takes = [
            _take(key, what, bucket, 1.0, float(what == "requests")) for what, bucket in limited
        ]
        if not takes:
            return
        try:
            if not self._store.available or self._clock() < self._ask_at:
                raise StoreUnavailable("the store is lost")
            async with asyncio.timeout(TAKE_S):
                taken = await self._store.take(takes)
        except (StoreUnavailable, TimeoutError) as error:
            if isinstance(error, TimeoutError):
                self._ask_at = self._clock() + AGAIN_S
            self._alone().admit(key)
            return
        self._lost = False
        now = self._clock()
        for (_, bucket), level in zip(limited, taken.levels, strict=True):
            bucket.set(level, now)
        if not taken.admitted:
            allowance.check(now)

    def charge(self, key: Key, tokens: int) -> None:
        """Count tokens: here at once, in the store soon."""
        if not tokens or not self._limits(key) or self._allowance(key).tokens is None:
            return
        super().charge(key, tokens)
        if self._share is not None and self._lost:
            self._share.charge(key, tokens)
        self._owed[key] += tokens
        if self._charging is None:
            self._charging = self._tasks.create_task(self._charge(), name="charge tokens")

    def close(self) -> None:
        """Stop telling the store."""
        if self._charging is not None:
            self._charging.cancel()

    async def _charge(self) -> None:
        try:
            while self._owed:
                key, tokens = self._owed.popitem()
                bucket = self._allowance(key).tokens
                if bucket is None:
                    continue
                try:
                    await self._store.take([_take(key, "tokens", bucket, ALWAYS, tokens)])
                except StoreUnavailable:
                    self._owed[key] += tokens  # with the next charge
                    return
        finally:
            self._charging = None

    def _alone(self) -> RateLimits:
        """Return the limits of this router's share."""
        if self._lost and self._share is not None:
            return self._share
        self._lost, parts = True, self._routers()
        log.warning("the store is lost or slow: this router admits 1/%d of each limit", parts)
        if self._share is None or self._share.parts != parts:
            self._share = RateLimits(*self._defaults, self._clock, parts=parts)
        return self._share


def _take(key: Key, what: str, bucket: Bucket, needed: float, amount: float) -> Take:
    return Take(f"{key.digest.hex()[:32] or 'anybody'}:{what}", bucket.limit, needed, amount)
