"""Back-pressure: requests that the engines have no room for wait here, each in its turn."""

from __future__ import annotations

import asyncio
import bisect
import itertools
from contextlib import suppress

from engine.protocol import NoCapacity

__all__ = ["AdmissionQueue", "Place"]

Order = tuple[int, float, int]  # priority, time of arrival, tie-break


class Place:
    """One choice's place, for as long as the body of `with` runs. Not in the queue before it meets
    others that wait, or no room."""

    __slots__ = ("_backlog", "_turn", "order")

    def __init__(self, backlog: AdmissionQueue, order: Order) -> None:
        self.order = order
        self._backlog = backlog
        self._turn = asyncio.Event()  # it is the first, or room may have been made

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *_: object) -> None:
        self._backlog.leave(self)

    async def wait(self, full: NoCapacity | None, *, deadline: float) -> None:
        """Wait until it may (again) be tried to find room. `full`: it was tried just now.

        The first in the queue tries when a request has ended, or when Retry-After says so. Raises
        `full`, or `NoCapacity`, if the queue is full or the turn does not come before `deadline`
        (loop time). Cancellation ends the wait; the place ends with its `with`.
        """
        queue = self._backlog.queue
        if self not in queue:
            if full is None and (not queue or self.order < queue[0].order):
                return
            self._backlog.enter(self, full)
        came_first = False
        try:
            async with asyncio.timeout_at(deadline):
                while queue[0] is not self:
                    await self._turn.wait()
                    self._turn.clear()
                    came_first = True  # the one before it has found room: there may be more
                if full is not None and not came_first:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(full.retry_after_s):
                            await self._turn.wait()
                    self._turn.clear()
        except TimeoutError:
            raise full or NoCapacity("no turn came in time") from None

    def admitted(self) -> None:
        """It has found room: the next in the queue may try."""
        self._backlog.leave(self)

    def wake(self) -> None:
        self._turn.set()


class AdmissionQueue:
    """A bounded queue, by priority (lower is earlier), then in order of arrival.

    Only its first tries to find room, and whoever comes stands behind those that wait; so a small
    request cannot starve a large one. What is in the queue is waiting or is the one that tries.
    """

    def __init__(self, limit: int) -> None:
        self.queue: list[Place] = []
        self._limit = limit
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self.queue)

    def place(self, priority: int, arrived: float) -> Place:
        """A place for whoever `arrived` (loop time)."""
        return Place(self, (priority, arrived, next(self._numbers)))

    def freed(self) -> None:
        """A request has ended: the first in the queue may try again."""
        if self.queue:
            self.queue[0].wake()

    def enter(self, place: Place, full: NoCapacity | None) -> None:
        """Raises `full`, or `NoCapacity`, if the queue is full."""
        if len(self.queue) >= self._limit:
            raise full or NoCapacity(f"{len(self.queue)} requests are waiting")
        bisect.insort(self.queue, place, key=_order)

    def leave(self, place: Place) -> None:
        """Idempotent."""
        if place in self.queue:
            first = self.queue[0] is place
            self.queue.remove(place)
            if first:
                self.freed()


def _order(place: Place) -> Order:
    return place.order
