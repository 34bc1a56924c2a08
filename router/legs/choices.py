"""The choices of one prompt: the first runs the strategy, the others fork its KV where it is.

    choice 0   strategy ──► start_generate(forks=2) ──► …
    choice 1      └ waits ──────────┴► start_generate(fork_of=…)   on the same engine
    choice 2      └ waits ──────────┴► start_generate(fork_of=…)

Only the first attempt of a choice forks. After a failure, or with nothing to fork from, a choice
continues like any other request: the strategy runs for it alone.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from router.base import EngineRequestId
from router.engines import Backend
from router.legs.replica import MirrorPlan

__all__ = ["Choices", "Origin"]


@dataclass(frozen=True, slots=True)
class Origin:
    """The engine that runs the first choice, and the choice's name there."""

    backend: Backend
    request_id: EngineRequestId
    mirror: MirrorPlan | None = None  # of the first choice, and so of the others


class Choices:
    """State shared by the choices of one prompt. Made on the event loop that runs them."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._origin: asyncio.Future[Origin | None] = asyncio.get_running_loop().create_future()

    def expected(self, choice: int) -> int:
        """Return how many choices will fork a generation of `choice` that is about to start."""
        return 0 if choice or self._origin.done() else self._count - 1

    def started(self, choice: int, origin: Origin) -> None:
        """An engine accepted a generation of `choice`; the first choice's can be forked."""
        if not choice and not self._origin.done():
            self._origin.set_result(origin)

    def over(self) -> None:
        """The first choice has ended; stop waiting for it."""
        if not self._origin.done():
            self._origin.set_result(None)

    async def origin(self) -> Origin | None:
        """Wait until the first choice has started; `None` if it ended without starting."""
        return await asyncio.shield(self._origin)  # the other choices wait for it too
