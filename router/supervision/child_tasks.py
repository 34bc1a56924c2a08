"""The tasks that a strategy starts: they end with the run of the strategy that started them."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from typing import Any

from router.supervision.supervised import Supervised
from router.supervision.user_frames import asked_by_user

__all__ = ["ChildTasks", "adopting"]

_current: ContextVar[ChildTasks | None] = ContextVar("child_tasks", default=None)


class ChildTasks:
    """The tasks that one run of a strategy has started, each on a leash of its own."""

    def __init__(self, *, grace: float, on_ignored: Callable[[], None], holder: Any = None) -> None:
        self._grace = grace
        self._on_ignored = on_ignored
        self._holder = holder
        self._leashes: dict[asyncio.Task[Any], Supervised] = {}
        self._ending = False

    def __len__(self) -> int:
        """How many still run."""
        return len(self._leashes)

    def context(self) -> Context:
        """What the user's code starts in this context, and in tasks started there, belongs here."""
        context = copy_context()
        context.run(_current.set, self)
        return context

    def spawn(
        self, loop: asyncio.AbstractEventLoop, work: Any, **options: Any
    ) -> asyncio.Task[Any]:
        leash = Supervised(
            work, grace=self._grace, on_ignored=self._on_ignored, holder=self._holder
        )
        task = leash.start(loop, **options)
        self._leashes[task] = leash
        task.add_done_callback(self._leashes.pop)
        if self._ending:
            leash.end()
        return task

    def begin_end(self) -> list[asyncio.Task[Any]]:
        """Cancel all that still run; returns them. What they start from now on ends at once."""
        self._ending = True
        left = [task for task in self._leashes if not task.done()]
        for task in left:
            self._leashes[task].end()
        return left

    async def end(self) -> int:
        """Cancel all that still run and wait for them; returns how many that were.

        Takes no longer than a leash's grace. Cancelled, it stops waiting: they end all the same.
        """
        left = self.begin_end()
        if left:
            await asyncio.wait(left)
        for task in left:
            if task.done() and not task.cancelled():
                task.exception()  # seen: the strategy did not wait for it, so nobody else will
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
    # In a strategy's context tasks are also made by us, as releases, which outlive the request.
    if child_tasks is None or not asked_by_user(sys._getframe(1)):
        return asyncio.Task(work, loop=loop, **options)
    return child_tasks.spawn(loop, work, **options)
