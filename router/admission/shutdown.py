"""The orderly end of a router: no new requests, and some time for those that run."""

from __future__ import annotations

import asyncio
from contextlib import suppress

__all__ = ["Shutdown"]


class Shutdown:
    """Counts the requests to the model.

    Once `begun`, new ones are refused and `/health` is 503, but the router still listens: load
    balancers must notice before connections fail.
    """

    def __init__(self) -> None:
        self.begun = False
        self.running = 0
        self._over = asyncio.Event()

    def request_begins(self) -> None:
        """Count a request until `request_ends`."""
        self.running += 1

    def request_ends(self) -> None:
        self.running -= 1
        if self.begun and not self.running:
            self._over.set()

    async def finish(self, bound_s: float) -> int:
        """Refuse new requests and wait at most `bound_s` seconds for those that run.

        Returns how many still run; the caller cancels them.
        """
        self.begun = True
        if self.running:
            with suppress(TimeoutError):
                async with asyncio.timeout(bound_s):
                    await self._over.wait()
        return self.running

    def hurry(self) -> None:
        """Stop waiting."""
        self._over.set()
