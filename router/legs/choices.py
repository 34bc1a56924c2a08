"""The choices of one prompt: the first runs the strategy, the others fork its KV where it is.

    choice 0   strategy ──► start_generate(forks=2) ──► …
    choice 1      └ waits ──────────┴► start_generate(fork_of=…)   on the same engine
    choice 2      └ waits ──────────┴► start_generate(fork_of=…)

Only the first attempt of a choice forks. What fails, or finds nothing to fork from, goes on as any
other request does: the strategy is run for it alone.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from router.base.ids import EngineRequestId
from router.engines.backend import Backend
from router.legs.replica import Mirror

__all__ = ["Choices", "Origin"]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the first choice was started, and by which name it is known there."""

    backend: Backend
    request_id: EngineRequestId
    mirror: Mirror | None = None  # of the first choice, and so of the others


class Choices:
    """What the choices of one prompt know of each other. Made on the event loop that runs them."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._origin: asyncio.Future[Origin | None] = asyncio.get_running_loop().create_future()

    def expected(self, choice: int) -> int:
        """How many will fork from a generation of `choice` that is about to be started."""
        return 0 if choice or self._origin.done() else self._count - 1

    def started(self, choice: int, origin: Origin) -> None:
        """A generation of `choice` was accepted by an engine: that of the first can be forked."""
        if not choice and not self._origin.done():
            self._origin.set_result(origin)

    def over(self) -> None:
        """The first choice has ended: nobody is to wait for it any longer."""
        if not self._origin.done():
            self._origin.set_result(None)

    async def origin(self) -> Origin | None:
        """Wait until the first choice is started. None: it has ended without."""
        return await asyncio.shield(self._origin)  # the others wait for it too
