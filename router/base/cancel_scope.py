"""A stretch of a task's work that can be cut short from outside."""

from __future__ import annotations

import asyncio
from types import TracebackType

__all__ = ["CancelScope"]


class CancelScope:
    """`asyncio.timeout` without a time: around each call to an engine, so it is a plain `with`.

    After `make` the body is cancelled, and leaving it raises `TimeoutError`, unless something else
    has cancelled the task too. Entered once, by the task that is cut.
    """

    __slots__ = ("_before", "_task", "made")

    def __init__(self) -> None:
        self.made = False
        self._task: asyncio.Task[object] | None = None
        self._before = 0

    def __enter__(self) -> CancelScope:
        self._task = task = asyncio.current_task()
        if task is None:
            raise RuntimeError("outside of a task there is nothing to cut")
        self._before = task.cancelling()
        return self

    def make(self) -> None:
        """Cut it now. Idempotent."""
        if self._task is not None and not self.made:
            self.made = True
            self._task.cancel()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        task, self._task = self._task, None
        if not self.made or task is None:
            return
        ours = task.uncancel() <= self._before
        if ours and kind is not None and issubclass(kind, asyncio.CancelledError):
            raise TimeoutError from error
