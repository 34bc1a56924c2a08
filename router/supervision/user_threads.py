"""Runs user code in daemon threads with a deadline."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from router.base import StrategyError
from router.supervision.interruption import interrupt
from router.supervision.user_frames import is_user

__all__ = ["UserThreads"]

T = TypeVar("T")
log = logging.getLogger(__name__)
STOP_S = 2.0  # for a thread past its deadline
LOOK_S = 0.02


class UserThreads:
    """Threads that neither the event loop nor the exit of the process waits for."""

    def __init__(self) -> None:
        self._late: set[threading.Thread] = set()

    @property
    def late(self) -> int:
        """How many threads still run although they are past their deadline."""
        self._late = {thread for thread in self._late if thread.is_alive()}
        return len(self._late)

    async def run(self, name: str, work: Callable[[], T], *, limit_s: float) -> T:
        """Run `work` in a thread and return its result.

        Raises what `work` raises, `StrategyError` for what would end the event loop, and
        `TimeoutError` after `limit_s` seconds. Then, and if it is
        cancelled, the thread is interrupted where it runs Python code of the user. Code that
        catches everything, or waits in C, runs on.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def settle(result: T | None, error: BaseException | None) -> None:
            if done.done():
                return
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(result)  # type: ignore[arg-type]  # of `work`

        def body() -> None:
            result, failure = None, None
            try:
                result = work()
            except BaseException as error:  # noqa: BLE001  it is raised in `run`
                failure = error if isinstance(error, Exception) else _as_failure(name, error)
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(settle, result, failure)

        thread = threading.Thread(target=body, name=name, daemon=True)
        thread.start()
        try:
            async with asyncio.timeout(limit_s):
                return await done
        finally:
            if not done.done() or done.cancelled():
                self._late.add(thread)
                threading.Thread(target=_stop, args=(thread,), daemon=True).start()


def _as_failure(name: str, error: BaseException) -> StrategyError:
    return StrategyError(f"{name}: {type(error).__name__}")


def _stop(thread: threading.Thread) -> None:
    """Interrupt a thread until it ends, for `STOP_S` at most."""
    for _ in range(round(STOP_S / LOOK_S)):
        interrupt(thread.ident or 0, is_user)
        thread.join(LOOK_S)
        if not thread.is_alive():
            return
    log.error("the thread %s cannot be stopped: it goes on until the process ends", thread.name)
