"""The orderly end of an engine: its router moves the work elsewhere before the process ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

__all__ = ["Departure"]

LOOK_S = 0.05  # between two looks whether something runs
QUIET_S = 0.5  # a request consists of several calls, and routers learn of a goodbye at other times


class Departure:
    """Lets an engine leave within `bound_s` seconds after the first signal; with 0, at once.

    `idle` tells whether nothing runs there. `announcing` is the registration, which says goodbye
    when it is cancelled: a router then gives the engine no new work, and moves what runs there.
    """

    def __init__(self, bound_s: float, idle: Callable[[], bool]) -> None:
        self.announcing: asyncio.Task[None] | None = None
        self._bound_s = bound_s
        self._idle = idle
        self._hurry = asyncio.Event()

    def hurry(self) -> None:
        """Stop waiting."""
        self._hurry.set()

    async def leave(self) -> None:
        """Say goodbye, and wait until nothing runs, for the bound at most."""
        if not self._bound_s:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(self._bound_s):
                if self.announcing is not None:
                    self.announcing.cancel()
                    await asyncio.wait([self.announcing])
                await self._quiet()

    async def _quiet(self) -> None:
        clock = asyncio.get_running_loop().time
        busy_at = clock()
        while not self._hurry.is_set() and clock() - busy_at < QUIET_S:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._hurry.wait(), LOOK_S)
            if not self._idle():
                busy_at = clock()
