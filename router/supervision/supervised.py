"""Somebody else's coroutine, held so that it can be made to end.

A strategy is the user's code. Cancelled, it may catch the cancellation and go on, or wait for ever
in its cleanup. A task is at the mercy of its coroutine; on a leash it is not: the leash stands
between them, and where the coroutine does not end in time, lets go of it and ends the task.

 Task ──send, throw──► Supervised ──send, throw──► coroutine ──► strategy ──► … ──► a future
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from contextlib import suppress
from typing import Any

__all__ = ["Interrupted", "Supervised"]


class Interrupted(BaseException):
    """Raised by the watchdog inside a strategy that holds up the event loop."""


class Supervised(Coroutine[Any, Any, Any]):
    """Runs `coroutine` in a task of its own, from `start` on.

    Left alone it is transparent: value, error and cancellations are the coroutine's. After `end`
    the task ends within `grace` seconds, if need be without it; `on_ignored` is called then.

    `holder` is for the watchdog, which finds it in the stack of a thread that stands still.
    """

    __slots__ = (
        "_coroutine", "_error", "_grace", "_let_go", "_on_ignored", "_task", "_timer", "ending",
        "holder",
    )  # fmt: skip

    def __init__(
        self,
        coroutine: Coroutine[Any, Any, Any],
        *,
        grace: float,
        on_ignored: Callable[[], None],
        holder: Any = None,
    ) -> None:
        self.holder = holder
        self.ending = False
        self._coroutine = coroutine
        self._grace = grace
        self._on_ignored = on_ignored
        self._error: Exception | None = None
        self._let_go = False
        self._task: asyncio.Task[Any] | None = None  # while it runs
        self._timer: asyncio.TimerHandle | None = None

    def start(self, loop: asyncio.AbstractEventLoop, **options: Any) -> asyncio.Task[Any]:
        """Its task; `options` as of `asyncio.Task`."""
        self._task = task = asyncio.Task(self, loop=loop, **options)
        task.add_done_callback(self._over)
        return task

    def end(self, error: Exception | None = None) -> None:
        """Cancel the coroutine. Its task ends in `error`, or cancelled, whatever it makes of that.

        Idempotent: the first `error` counts.
        """
        task = self._task
        if self.ending or task is None or task.done():
            return
        self.ending, self._error = True, error
        task.cancel()
        self._timer = task.get_loop().call_later(self._grace, self._overdue)

    def send(self, value: Any) -> Any:
        try:
            return self._coroutine.send(value)
        except Interrupted as late:
            return self._pass_on(late)
        except BaseException as error:
            self._ended(error)
            raise

    def throw(self, error: Any, value: Any = None, traceback: Any = None) -> Any:
        try:
            if self._let_go:
                self._on_ignored()
                raise error
            return self._coroutine.throw(error)
        except Interrupted as late:
            return self._pass_on(late)
        except BaseException as failure:
            self._ended(failure)
            raise

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        raise RuntimeError("a leash is started, not awaited")

    def _pass_on(self, late: Interrupted) -> Any:
        """It came when the coroutine had just gone to wait, but it is meant for it."""
        if getattr(self._coroutine, "cr_frame", None) is None:
            raise late
        return self._coroutine.throw(late)

    def _ended(self, how: BaseException) -> None:
        """Raises what the task ends in, if that is something else. Called on every way out, so that
        an `Interrupted` which is still on its way arrives here at the latest, and not in somebody
        else's code."""
        if self.ending:
            raise self._error or asyncio.CancelledError() from None
        if isinstance(how, SystemExit):  # a task that exits, takes the event loop with it
            raise RuntimeError("SystemExit") from how

    def _overdue(self) -> None:
        if self._task is not None and not self._task.done():
            self._let_go = True
            self._task.cancel()

    def _over(self, task: asyncio.Task[Any]) -> None:
        self._task = None  # it knows us: nothing here is for the collector
        if self._timer is not None:
            self._timer.cancel()
        # Let go of, or never begun: its `finally`s may run, but wait for nothing.
        with suppress(RuntimeError):
            self._coroutine.close()
