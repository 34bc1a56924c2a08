"""The end of a router: nothing new, and some time for what runs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress

__all__ = ["Drain"]


class Drain:
    """Counts the requests to the model. From `begun` on new ones are refused and `/health` is 503,
    while the router still listens: load balancers are to see it before connections fail."""

    def __init__(self) -> None:
        self.begun = False
        self.running = 0
        self._over = asyncio.Event()

    @contextmanager
    def request(self) -> Iterator[None]:
        """Counts one for as long as the body runs."""
        self.running += 1
        try:
            yield
        finally:
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
