"""The orderly end of a router: no new requests, and some time for those that run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

__all__ = ["Shutdown"]


class Shutdown:
    """Counts the requests to the model.

    Once `begun`, new ones are refused and `/health` is 503, but the router still listens: load
    balancers must notice before connections fail.
    """

    def __init__(self) -> None:
        self.begun = False
        self._running: set[Callable[[], None]] = set()
        self._over = asyncio.Event()

    def request_begins(self, end: Callable[[], None]) -> None:
        """Count a request until `request_ends` with the same `end`, which ends it early."""
        self._running.add(end)

    def request_ends(self, end: Callable[[], None]) -> None:
        self._running.remove(end)
        if self.begun and not self._running:
            self._over.set()

    async def finish(self, bound_s: float) -> int:
        """Refuse new requests and wait at most `bound_s` seconds for those that run.

        Returns how many still run; `end_requests` ends them.
        """
        self.begun = True
        if self._running:
            with suppress(TimeoutError):
                async with asyncio.timeout(bound_s):
                    await self._over.wait()
        return len(self._running)

    def end_requests(self) -> None:
        """End the requests that still run, each with an error for its client."""
        for end in list(self._running):
            end()

    def hurry(self) -> None:
        """Stop waiting."""
        self._over.set()
