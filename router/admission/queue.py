"""Back-pressure: requests wait here, in order, while the engines have no room for them."""

from __future__ import annotations

import asyncio
import bisect
import itertools
from contextlib import suppress

from engine.protocol import NoCapacity
from router.base import Pauses

__all__ = ["AdmissionQueue", "Place"]

Order = tuple[int, float, int]  # priority, time of arrival, tie-break
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.01, 1.0  # between tries, at least
LONGEST_WAIT_S = 5.0  # whatever Retry-After says: another engine may have room


class Place:
    """One choice's place, held while the body of `with` runs.

    It enters the queue only if others already wait, or an engine had no room.
    """

    __slots__ = ("_pauses", "_queue", "_turn", "order")

    def __init__(self, queue: AdmissionQueue, order: Order) -> None:
        self.order = order
        self._queue = queue
        self._turn = asyncio.Event()  # it may be first now, or there may be room
        self._pauses: Pauses | None = None  # between tries, from the first one in vain on

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *_: object) -> None:
        self._queue.leave(self)

    async def wait(self, full: NoCapacity | None, *, deadline: float) -> None:
        """Wait until the next try to find room; `full` is the error of a try that just failed.

        The first in the queue tries when a request has ended, or after Retry-After, but less and
        less often. Raises `full`, or `NoCapacity`, if the queue is full or the turn does not come
        before `deadline` (loop time). Cancellation ends the wait; the place ends with its `with`.
        """
        places = self._queue.places
        if self not in places:
            if full is None and (not places or self.order < places[0].order):
                return
            self._queue.enter(self, full)
        came_first = False
        try:
            async with asyncio.timeout_at(deadline):
                while places[0] is not self:
                    await self._turn.wait()
                    self._turn.clear()
                    came_first = True  # the place before it has found room: there may be more
                if full is not None and not came_first:
                    # An engine that always asks to retry at once must not be asked all the time.
                    self._pauses = self._pauses or Pauses(FIRST_PAUSE_S, LONGEST_PAUSE_S)
                    pause_s = max(full.retry_after_s, self._pauses.next())
                    with suppress(TimeoutError):
                        async with asyncio.timeout(min(pause_s, LONGEST_WAIT_S)):
                            await self._turn.wait()
                    self._turn.clear()
        except TimeoutError:
            raise full or NoCapacity("no turn came in time") from None

    def admitted(self) -> None:
        """Note that it has found room: the next in the queue may try."""
        self._pauses = None  # short again
        self._queue.leave(self)

    def wake(self) -> None:
        self._turn.set()


class AdmissionQueue:
    """A bounded queue, by priority (lower is earlier), then by arrival.

    Only the first in the queue tries to find room, and newcomers queue behind waiters; so small
    requests cannot starve a large one.
    """

    def __init__(self, limit: int) -> None:
        self.places: list[Place] = []
        self._limit = limit
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self.places)

    def place(self, priority: int, arrived: float) -> Place:
        """Return the place of a request that `arrived` at this loop time."""
        return Place(self, (priority, arrived, next(self._numbers)))

    def freed(self) -> None:
        """Note that a request has ended: the first in the queue may try again."""
        if self.places:
            self.places[0].wake()

    def enter(self, place: Place, full: NoCapacity | None) -> None:
        """Insert `place`. Raises `full`, or `NoCapacity`, if the queue is full."""
        if len(self.places) >= self._limit:
            raise full or NoCapacity(f"{len(self.places)} requests are waiting")
        bisect.insort(self.places, place, key=_order)

    def leave(self, place: Place) -> None:
        """Remove `place`. Idempotent."""
        if place in self.places:
            first = self.places[0] is place
            self.places.remove(place)
            if first:
                self.freed()


def _order(place: Place) -> Order:
    return place.order
