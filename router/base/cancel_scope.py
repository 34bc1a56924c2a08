"""A section of a task that can be cancelled from outside."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any

__all__ = ["CancelScope"]


class CancelScope:
    """`asyncio.timeout` without a deadline; a plain `with`, cheap enough for every engine call.

    `cancel` cancels the body, and leaving the body then raises `TimeoutError`, unless something
    else has cancelled the task too. Entered once, by the task that `cancel` cancels. A caller that
    knows this task may give it: looking it up takes three calls.
    """

    __slots__ = ("_before", "_known", "_task", "cancelled")

    def __init__(self, task: asyncio.Task[Any] | None = None) -> None:
        self.cancelled = False
        self._known = task
        self._task: asyncio.Task[Any] | None = None  # while the body runs
        self._before = 0

    def __enter__(self) -> CancelScope:
        self._task = task = self._known or asyncio.current_task()
        if task is None:
            raise RuntimeError("a CancelScope needs a task to cancel")
        self._before = task.cancelling()
        return self

    def cancel(self) -> None:
        """Cancel the body now. Idempotent."""
        if self._task is not None and not self.cancelled:
            self.cancelled = True
            self._task.cancel()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        task, self._task = self._task, None
        if not self.cancelled or task is None:
            return
        ours = task.uncancel() <= self._before
        if ours and kind is not None and issubclass(kind, asyncio.CancelledError):
            raise TimeoutError from error
