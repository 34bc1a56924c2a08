"""A user's coroutine, supervised so that it can be made to end.

A strategy is the user's code. When cancelled, it may catch the cancellation and go on, or wait
for ever in its cleanup, and its task cannot end before it. `Supervised` stands between task and
coroutine: if the coroutine does not end in time, `Supervised` abandons it and ends the task.

 Task ──send, throw──► Supervised ──send, throw──► coroutine ──► strategy ──► … ──► a future
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Protocol

from router.base import fired_late
from router.supervision.interruption import Interrupted
from router.supervision.violations import ViolationKind

__all__ = ["Holder", "Supervised"]


class Holder(Protocol):
    """Whose coroutine it is: it is named in logs and charged with violations."""

    @property
    def label(self) -> str:
        """Its name in errors and logs."""
        ...

    def add_violation(self, kind: ViolationKind, message: str) -> None:
        """Count a violation. Called on the event loop."""
        ...


class Supervised(Coroutine[Any, Any, Any]):
    """Runs `coroutine` in a task of its own, from `start` on.

    It is transparent until `end`: value, error and cancellations are the coroutine's. After `end`
    the task ends within `grace` seconds, if need be without the coroutine; `on_ignored` is called
    then. The watchdog finds `holder` in the stack of a blocked thread.
    """

    __slots__ = (
        "_abandoned", "_coroutine", "_error", "_grace", "_on_ignored", "_task", "_timer", "ending",
        "holder",
    )  # fmt: skip

    def __init__(
        self,
        coroutine: Coroutine[Any, Any, Any],
        *,
        grace: float,
        on_ignored: Callable[[], None],
        holder: Holder | None = None,
    ) -> None:
        self.holder = holder
        self.ending = False
        self._coroutine = coroutine
        self._grace = grace
        self._on_ignored = on_ignored
        self._error: Exception | None = None
        self._abandoned = False
        self._task: asyncio.Task[Any] | None = None  # while it runs
        self._timer: asyncio.TimerHandle | None = None

    def start(self, loop: asyncio.AbstractEventLoop, **options: Any) -> asyncio.Task[Any]:
        """Start and return its task; `options` are those of `asyncio.Task`."""
        self._task = task = asyncio.Task(self, loop=loop, **options)
        task.add_done_callback(self._over)
        return task

    def end(self, error: Exception | None = None) -> None:
        """Cancel the coroutine. Its task ends with `error`, or cancelled, whatever happens inside.

        Idempotent: the first `error` counts.
        """
        task = self._task
        if self.ending or task is None or task.done():
            return
        self.ending, self._error = True, error
        task.cancel()
        self._timer = task.get_loop().call_later(self._grace, self._abandon)

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
            if self._abandoned:
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

    @property
    def running(self) -> bool:
        """Whether its own task runs it now: it is not being closed from outside."""
        return self._task is not None and asyncio.current_task() is self._task

    def __await__(self) -> Generator[Any, Any, Any]:
        raise RuntimeError("start a Supervised; it cannot be awaited")

    def _pass_on(self, late: Interrupted) -> Any:
        """Throw into the coroutine an exception that arrived just after it had begun to wait."""
        if getattr(self._coroutine, "cr_frame", None) is None:
            raise late
        return self._coroutine.throw(late)

    def _ended(self, how: BaseException) -> None:
        """Raise what the task must end with, if that differs from `how`.

        Called on every exit, so that an `Interrupted` still under way arrives here at the latest,
        and never in unrelated code.
        """
        if self.ending:
            raise self._error or asyncio.CancelledError() from None
        if isinstance(how, SystemExit | KeyboardInterrupt):  # they would stop the event loop
            raise RuntimeError(type(how).__name__) from how

    def _abandon(self) -> None:
        if self._timer is not None and fired_late(self._timer):
            # The coroutine had no time either.
            self._timer = asyncio.get_running_loop().call_later(self._grace, self._abandon)
            return
        if self._task is not None and not self._task.done():
            self._abandoned = True
            self._task.cancel()

    def _over(self, task: asyncio.Task[Any]) -> None:
        self._task = None  # break the reference cycle with the task
        if self._timer is not None:
            self._timer.cancel()
        # Abandoned, or never begun: its `finally` blocks may run, but cannot wait.
        try:  # noqa: SIM105  each request comes here, and `suppress` makes three calls
            self._coroutine.close()
        except RuntimeError:
            pass
