"""Virtual time: an event loop whose clock jumps to the next timer when nothing else is ready."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["Standstill", "VirtualLoop"]

# Threads and sockets run in real time: the clock jumps only after they had this long to report.
REAL_S = 0.05
# Without any, only the pipe with which threads wake the loop is to be emptied now and then.
REAL_EVERY = 256  # calls
# Callbacks that always call back at once would never let the clock jump. A run of a hundred
# thousand requests has some thousand rounds of the loop within `MOMENT_S`.
MOST_ROUNDS, MOMENT_S = 1 << 20, 1e-6


class Standstill(Exception):
    """Time does not pass any more: something on the loop continues without ever waiting."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """`time()` begins at 0. An hour of `asyncio.sleep` takes no real time.

    It ends with `Standstill` where a real loop would be busy for ever. Beyond 2**23 s (97 days)
    its timers are not exact: there a float's steps are larger than asyncio's resolution.
    """

    def __init__(self) -> None:
        self._clock = _JumpingSelector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now

    def run_in_executor(  # type: ignore[override]  # typeshed has more overloads
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        future = super().run_in_executor(executor, func, *args)
        self._clock.threads += 1
        future.add_done_callback(self._clock.thread_ended)
        return future


class _JumpingSelector(selectors.BaseSelector):
    """Advances the clock where a selector would wait."""

    def __init__(self) -> None:
        self.now = 0.0
        self.threads = 0
        self._calls = 0  # without a look at what is real
        self._rounds, self._since = 0, 0.0  # calls since the clock was there
        self._real = selectors.DefaultSelector()
        self._registered = 0

    def thread_ended(self, _: asyncio.Future[Any]) -> None:
        self.threads -= 1

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        sockets = self._registered - 1  # without the one that the loop wakes itself with
        if timeout is not None and not self.threads and not sockets:
            self._calls += 1
            if self._calls < REAL_EVERY:
                if timeout > 0:
                    self.now += timeout
                return []
        self._check_passing()
        self._calls = 0
        if timeout is None or timeout <= 0:
            return self._real.select(timeout)
        ready = self._real.select(REAL_S if self.threads or sockets else 0)
        if not ready:
            self.now += timeout
        return ready

    def _check_passing(self) -> None:
        """Raise `Standstill` after too many rounds of the loop at one moment."""
        if self.threads or self.now - self._since > MOMENT_S:
            self._rounds, self._since = 0, self.now
            return
        self._rounds += max(self._calls, 1)
        if self._rounds > MOST_ROUNDS:
            self._rounds = 0
            raise Standstill(f"no time passes {self.now:g} s after the start")

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        key = self._real.register(fileobj, events, data)
        self._registered += 1
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        key = self._real.unregister(fileobj)
        self._registered -= 1
        return key

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._real.get_map()

    def close(self) -> None:
        self._real.close()
