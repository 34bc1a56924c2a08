"""Notices that something has changed, for any number of waiting tasks."""

from __future__ import annotations

import asyncio
from contextlib import suppress

__all__ = ["Notices"]


class Notices:
    """Counts notices, and wakes whoever waits for a further one."""

    def __init__(self) -> None:
        self._count = 0
        self._waiting: set[asyncio.Future[None]] = set()

    def notify(self) -> None:
        """Count a notice."""
        self._count += 1
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self, seen: int, timeout_s: float) -> int:
        """Wait until there are more notices than `seen`, or for `timeout_s` seconds.

        Returns how many there have been.
        """
        if self._count > seen:
            return self._count
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.add(waiter)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await waiter
        finally:
            self._waiting.discard(waiter)
        return self._count
