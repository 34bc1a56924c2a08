"""Requests that run on an engine which is to be empty: they go on elsewhere where they stopped."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from router.errors import Moved

if TYPE_CHECKING:
    from router.attempt import Attempt
    from router.member import Member

__all__ = ["Moves"]


class Moves:
    """The attempts that run. Costs nothing until an engine is drained."""

    def __init__(self) -> None:
        self._running: dict[Attempt, asyncio.Timeout] = {}

    @asynccontextmanager
    async def movable(self, attempt: Attempt) -> AsyncIterator[None]:
        """Around an attempt's work. Raises `Moved` if it has to go on elsewhere."""
        try:
            async with asyncio.timeout(None) as cut:
                self._running[attempt] = cut
                try:
                    yield
                finally:
                    del self._running[attempt]
        except TimeoutError:
            if not cut.expired():
                raise
            raise Moved("the engine is to be empty") from None

    def leave(self, member: Member) -> int:
        """Cut short all that waits for tokens of `member`, or is about to; returns how many.

        Sends from there may end in peace: they keep nobody for long.
        """
        now, moved = asyncio.get_running_loop().time(), 0
        for attempt, cut in self._running.items():
            if _lives_on(attempt, member) and not cut.expired():
                cut.reschedule(now)
                moved += 1
        return moved


def _lives_on(attempt: Attempt, member: Member) -> bool:
    return any(
        leg.engine == member.id
        and leg.request_id == attempt.request_id
        and leg.call in ("prep_recv", "start_generate")
        for leg in attempt.receipt.legs
    )
