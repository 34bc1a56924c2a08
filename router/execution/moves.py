"""Requests that run on an engine which is to be empty: they go on elsewhere where they stopped."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from router.base.cancel_scope import CancelScope
from router.base.errors import Moved

if TYPE_CHECKING:
    from router.engines.backend import Backend
    from router.legs.attempt import Attempt

__all__ = ["Relocations"]


class Relocations:
    """The attempts that run. Costs nothing until an engine is drained."""

    def __init__(self) -> None:
        self._running: dict[Attempt, CancelScope] = {}

    def movable(self, attempt: Attempt) -> _Movable:
        """Around an attempt's work: `with`. Raises `Moved` if it has to go on elsewhere."""
        return _Movable(self._running, attempt)

    def leave(self, backend: Backend) -> int:
        """Cut short all that waits for tokens of `backend`, or is about to; returns how many.

        Sends from there may end in peace: they keep nobody for long.
        """
        moved = 0
        for attempt, cut in self._running.items():
            if _lives_on(attempt, backend) and not cut.made:
                cut.make()
                moved += 1
        return moved


class _Movable:
    __slots__ = ("_attempt", "_cut", "_running")

    def __init__(self, running: dict[Attempt, CancelScope], attempt: Attempt) -> None:
        self._running = running
        self._attempt = attempt
        self._cut = CancelScope()

    def __enter__(self) -> None:
        self._cut.__enter__()
        self._running[self._attempt] = self._cut

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        del self._running[self._attempt]
        try:
            self._cut.__exit__(kind, error, traceback)
        except TimeoutError:
            raise Moved("the engine is to be empty") from None


def _lives_on(attempt: Attempt, backend: Backend) -> bool:
    return any(
        leg.engine == backend.id
        and leg.request_id == attempt.request_id
        and leg.call in ("prep_recv", "start_generate")
        for leg in attempt.receipt.legs
    )
