"""Notices that the event loop stands still, says whose code it is in, and ends it where it can.

A strategy runs on the router's event loop; one that does not await, holds up everybody. A thread
asks the loop for a sign of life, and looks at its stack when none comes:

    … asyncio ─► Supervised.send ─► StrategyRun._run ─► the strategy ─► (library) ─► where it is now
                 knows the generation      the user's frames

Python code, as in `while True: pass`, is ended by an exception that the interpreter raises in that
thread (`PyThreadState_SetAsyncExc`). Nobody else may be hit by it, so it is set only while the
innermost frame is the user's own, on a leash: it arrives at the next jump or call there, or at the
latest in the leash, which passes it on. Looking and setting must be one, so no other thread is
given the interpreter in between. In library code, which may hold a lock, and in ours, nothing is
raised.

What blocks in C, as `time.sleep`, cannot be ended: it is named and counted, and the exception meets
it when it returns. Code that holds the interpreter itself stops this thread too; `microserve up`
asks the router for its health from outside.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from router.rollout.revisions import Generation
from router.supervision.supervised import Interrupted, Supervised
from router.supervision.user_frames import at, is_user
from router.telemetry.metrics import Metrics

__all__ = ["Watchdog"]

log = logging.getLogger(__name__)
LOOK_S = 0.02
UNINTERRUPTED_S = 0.1  # looking and setting take a thousandth of it
_LEASH = (Supervised.send.__code__, Supervised.throw.__code__)


class Watchdog:
    """Watches the loop that it is started on. `limit_s`: how long that may stand still."""

    def __init__(self, metrics: Metrics, limit_s: float) -> None:
        self._metrics = metrics
        self._limit_s = limit_s
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._alive = threading.Event()
        self._stop = threading.Event()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch while the body runs."""
        thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            self._alive.set()
            thread.join()

    def _watch(self) -> None:
        while not self._stop.is_set():
            self._alive.clear()
            try:
                self._loop.call_soon_threadsafe(self._alive.set)
            except RuntimeError:  # the loop is closed
                return
            if self._alive.wait(self._limit_s):
                self._stop.wait(self._limit_s)
            else:
                self._stands_still(time.monotonic() - self._limit_s)

    def _stands_still(self, since: float) -> None:
        """Until the loop moves again: find one culprit in look after look, then name and end it.

        A machine that was suspended or is crowded looks like this too, but not for long.
        """
        suspect: Generation | None = None
        named: list[Generation | None] = []
        seen_since = time.monotonic()
        while not self._alive.wait(LOOK_S):
            frame = sys._current_frames().get(self._thread_id)
            leash = _leash_in(frame)
            found = leash.holder if leash is not None and _has_users(frame) else None
            now = time.monotonic()
            if found is not suspect:
                suspect, seen_since = found, now
            if now - seen_since < self._limit_s / 2:
                continue
            if suspect not in named:
                named.append(suspect)
                self._name(suspect, frame, now - since)
            if suspect is not None and leash is not None:
                self._interrupt(leash)
        if named:
            log.warning("the event loop runs again after %.2f s", time.monotonic() - since)

    def _name(self, suspect: Generation | None, frame: FrameType | None, seconds: float) -> None:
        stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
        who = suspect.label if suspect is not None else "the router"
        log.error("%s holds up the event loop, for %.2f s so far:\n%s", who, seconds, stack)
        if suspect is not None:
            message = f"holds up the event loop ({at(frame)})"
            self._loop.call_soon_threadsafe(suspect.offend, "blocked", message)
        else:
            self._metrics.stalls.inc()

    def _interrupt(self, leash: Supervised) -> None:
        before = sys.getswitchinterval()
        sys.setswitchinterval(UNINTERRUPTED_S)
        try:
            time.sleep(0)  # the other thread runs; when we are next, it waits by the new interval
            frame = sys._current_frames().get(self._thread_id)
            theirs = frame is not None and is_user(frame) and _leash_in(frame) is leash
            if theirs and not self._alive.is_set():
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(self._thread_id), ctypes.py_object(Interrupted)
                )
        finally:
            sys.setswitchinterval(before)


def _leash_in(frame: FrameType | None) -> Supervised | None:
    """The leash that this stack is on; of nested ones the inner one."""
    while frame is not None:
        if frame.f_code in _LEASH:
            leash = frame.f_locals.get("self")
            return leash if isinstance(leash, Supervised) else None
        frame = frame.f_back
    return None


def _has_users(frame: FrameType | None) -> bool:
    """Whether the user's code is on the stack above the leash."""
    while frame is not None and frame.f_code not in _LEASH:
        if is_user(frame):
            return True
        frame = frame.f_back
    return False
