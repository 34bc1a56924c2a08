"""The thread that runs puts as cooperative tasks, so that none blocks the others."""

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

__all__ = ["Task", "Worker"]

log = logging.getLogger(__name__)

Task = Callable[[], float | None]  # returns the seconds until its next call; None: finished


class Worker:
    """One thread that calls any number of tasks round-robin.

    A task that must wait returns a delay and is called again later; meanwhile the thread runs other
    tasks or sleeps. The thread ends with `close`, or without tasks once the last reference to the
    worker is gone.
    """

    def __init__(self, name: str) -> None:
        self._loop = _TaskLoop()
        self._thread = threading.Thread(target=self._loop.run, name=name, daemon=True)
        self._thread.start()
        weakref.finalize(self, self._loop.end)

    def submit(self, task: Task) -> None:
        """Call `task` on the thread, behind all ready tasks, until it returns None.

        After a call that returns a delay, the next call follows that many seconds later.

        Raises: `Internal` after `close`.
        """
        self._loop.add(task)

    def close(self) -> None:
        """Wait until all tasks are finished. Tasks may still submit others."""
        self._loop.end()
        self._thread.join()


class _TaskLoop:
    """State and loop of the thread, without a reference to the worker: the thread would keep the
    worker alive for ever."""

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._ready: deque[Task] = deque()
        self._later: list[tuple[float, int, Task]] = []  # heap by time, then by insertion
        self._order = count()
        self._running = False
        self._ended = False

    def add(self, task: Task) -> None:
        with self._change:
            if self._ended and not (self._ready or self._later or self._running):
                raise Internal("the transport is closed")
            self._ready.append(task)
            self._change.notify()

    def end(self) -> None:
        with self._change:
            self._ended = True
            self._change.notify()

    def run(self) -> None:
        while True:
            task = self._next()
            if task is None:
                return
            try:
                delay = task()
            except Exception:  # a task reports expected failures to its owner itself
                log.exception("a task of a transport failed")
                delay = None
            with self._change:
                self._running = False
                if delay == 0:
                    self._ready.append(task)
                elif delay is not None:
                    when = time.monotonic() + delay
                    heapq.heappush(self._later, (when, next(self._order), task))
            del task  # else the local variable keeps it alive until the next task arrives

    def _next(self) -> Task | None:
        """Wait for the next task that is due; return None at the end of the thread."""
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
