"""The thread that puts run on, turn by turn, so that none keeps the others waiting."""

from __future__ import annotations

import heapq
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from itertools import count

from kvcache.errors import Internal

__all__ = ["Turn", "Worker"]

log = logging.getLogger(__name__)

Turn = Callable[[], float | None]  # seconds until the next one is wanted; None: no more


class Worker:
    """One thread for any number of tasks, each of which is run in turns.

    A task that has to wait for something asks to be called again later; the others go on meanwhile,
    and if there are none the thread sleeps. It ends with `close`, or with the last reference once
    nothing is left to do.
    """

    def __init__(self, name: str) -> None:
        self._turns = _Turns()
        self._thread = threading.Thread(target=self._turns.run, name=name, daemon=True)
        self._thread.start()
        weakref.finalize(self, self._turns.end)

    def submit(self, turn: Turn) -> None:
        """Call `turn` on the thread until it returns None: behind all that are ready, or so many
        seconds later. Raises `Internal` after `close`."""
        self._turns.add(turn)

    def close(self) -> None:
        """Wait until all tasks are done; they may still add some."""
        self._turns.end()
        self._thread.join()


class _Turns:
    """What the thread knows. It must not know the worker, which would live for ever."""

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._ready: deque[Turn] = deque()
        self._later: list[tuple[float, int, Turn]] = []  # a heap by time, then by age
        self._ages = count()
        self._running = False
        self._ended = False

    def add(self, turn: Turn) -> None:
        with self._change:
            if self._ended and not (self._ready or self._later or self._running):
                raise Internal("the transport is closed")
            self._ready.append(turn)
            self._change.notify()

    def end(self) -> None:
        with self._change:
            self._ended = True
            self._change.notify()

    def run(self) -> None:
        while True:
            turn = self._next()
            if turn is None:
                return
            try:
                delay = turn()
            except Exception:  # a task tells its owner itself
                log.exception("a task of a transport failed")
                delay = None
            with self._change:
                self._running = False
                if delay == 0:
                    self._ready.append(turn)
                elif delay is not None:
                    when = time.monotonic() + delay
                    heapq.heappush(self._later, (when, next(self._ages), turn))
            del turn  # or it would live until the next one comes

    def _next(self) -> Turn | None:
        """The next turn, waited for; None when there will be none."""
        with self._change:
            while True:
                now = time.monotonic()
                while self._later and self._later[0][0] <= now:
                    self._ready.append(heapq.heappop(self._later)[2])
                if self._ready:
                    self._running = True
                    return self._ready.popleft()
                if self._ended and not self._later:
                    return None
                self._change.wait(self._later[0][0] - now if self._later else None)
