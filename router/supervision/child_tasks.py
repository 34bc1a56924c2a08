"""The tasks that a strategy starts: they end with the run of the strategy that started them."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from typing import Any

from router.supervision.supervised import Holder, Supervised
from router.supervision.user_frames import asked_by_user

__all__ = ["ChildTasks", "adopting"]

_current: ContextVar[ChildTasks | None] = ContextVar("child_tasks", default=None)


class ChildTasks:
    """The tasks that one run of a strategy has started, each supervised."""

    def __init__(
        self, *, grace: float, on_ignored: Callable[[], None], holder: Holder | None = None
    ) -> None:
        """The parameters are those of `Supervised`."""
        self._grace = grace
        self._on_ignored = on_ignored
        self._holder = holder
        self._running: dict[asyncio.Task[Any], Supervised] = {}
        self._ending = False

    def __len__(self) -> int:
        """How many still run."""
        return len(self._running)

    def context(self) -> Context:
        """Return a context; tasks that user code starts in it, or in such tasks, belong here."""
        context = copy_context()
        context.run(_current.set, self)
        return context

    def spawn(
        self, loop: asyncio.AbstractEventLoop, work: Any, **options: Any
    ) -> asyncio.Task[Any]:
        """Start a supervised task; `options` are those of `asyncio.Task`."""
        supervised = Supervised(
            work, grace=self._grace, on_ignored=self._on_ignored, holder=self._holder
        )
        task = supervised.start(loop, **options)
        self._running[task] = supervised
        task.add_done_callback(self._running.pop)
        if self._ending:
            supervised.end()
        return task

    def begin_end(self) -> list[asyncio.Task[Any]]:
        """Cancel and return all that still run. Tasks that they start from now on end at once."""
        self._ending = True
        left = [task for task in self._running if not task.done()]
        for task in left:
            self._running[task].end()
        return left

    async def end(self) -> int:
        """Cancel all that still run and wait for them; return how many there were.

        Takes at most `grace` seconds. Cancellation ends only the waiting.
        """
        left = self.begin_end()
        if left:
            await asyncio.wait(left)
        for task in left:
            if task.done() and not task.cancelled():
                task.exception()  # mark it as retrieved: the strategy did not wait for the task
        return len(left)


@contextmanager
def adopting(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """While the body runs, `loop` gives every task that a strategy starts to its `ChildTasks`."""
    before = loop.get_task_factory()
    loop.set_task_factory(_factory)
    try:
        yield
    finally:
        loop.set_task_factory(before)


def _factory(
    loop: asyncio.AbstractEventLoop,
    work: Coroutine[Any, Any, Any] | Generator[Any, None, Any],
    **options: Any,
) -> asyncio.Task[Any]:
    child_tasks = _current.get()
    # The router's own tasks also start in a strategy's context; releases outlive the request.
    if child_tasks is None or not asked_by_user(sys._getframe(1)):
        return asyncio.Task(work, loop=loop, **options)
    return child_tasks.spawn(loop, work, **options)
