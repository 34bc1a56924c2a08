"""Back-pressure: requests that the engines have no room for wait here, first come first served."""

from __future__ import annotations

import asyncio
import bisect

from engine.protocol import NoCapacity

__all__ = ["Backlog"]

Place = tuple[float, int, asyncio.Event]  # time of arrival, tie-break, "it may be your turn"


class Backlog:
    """A bounded queue in order of arrival. Only its head tries again, when Retry-After says so or
    earlier if a request has ended; so a small request cannot starve a large one for ever."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: list[Place] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._waiting)

    async def wait(self, full: NoCapacity, *, arrived: float, deadline: float) -> None:
        """Wait for the turn of a request that arrived at `arrived` (loop time) and met `full`.

        Raises `full` if the queue is full or the turn does not come before `deadline`.
        Cancellation gives up the place.
        """
        if len(self._waiting) >= self._limit:
            raise full
        self._count += 1
        turn = asyncio.Event()
        place = (arrived, self._count, turn)
        bisect.insort(self._waiting, place, key=_order)
        try:
            async with asyncio.timeout_at(deadline):
                while self._waiting[0] is not place:
                    await turn.wait()
                    turn.clear()
            await self._retry_after(turn, full, deadline)
        except TimeoutError:
            raise full from None
        finally:
            self._waiting.remove(place)
            self.freed()

    def freed(self) -> None:
        """A request has ended: the first in the queue may try again."""
        if self._waiting:
            self._waiting[0][2].set()

    async def _retry_after(self, turn: asyncio.Event, full: NoCapacity, deadline: float) -> None:
        now = asyncio.get_running_loop().time()
        if now >= deadline:
            raise TimeoutError
        try:
            async with asyncio.timeout_at(min(now + full.retry_after_s, deadline)):
                await turn.wait()
        except TimeoutError:
            if now + full.retry_after_s > deadline:
                raise


def _order(place: Place) -> tuple[float, int]:
    return place[:2]
