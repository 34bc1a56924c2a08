"""The end of a router: nothing new, and some time for what runs."""

from __future__ import annotations

import asyncio
from contextlib import suppress

__all__ = ["Shutdown"]


class Shutdown:
    """Counts the requests to the model. From `begun` on new ones are refused and `/health` is 503,
    while the router still listens: load balancers are to see it before connections fail."""

    def __init__(self) -> None:
        self.begun = False
        self.running = 0
        self._over = asyncio.Event()

    def request_begins(self) -> None:
        """Count one, until `request_ends`."""
        self.running += 1

    def request_ends(self) -> None:
        self.running -= 1
        if self.begun and not self.running:
            self._over.set()

    async def finish(self, bound_s: float) -> int:
        """Take nothing new and wait for what runs, `bound_s` seconds at most.

        Returns how many requests are left, which are to be cancelled.
        """
        self.begun = True
        if self.running:
            with suppress(TimeoutError):
                async with asyncio.timeout(bound_s):
                    await self._over.wait()
        return self.running

    def hurry(self) -> None:
        """Wait no longer."""
        self._over.set()
