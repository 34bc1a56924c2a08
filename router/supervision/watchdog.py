"""Notices a blocked event loop, names the code that blocks it, and interrupts it where possible.

A strategy runs on the router's event loop; one that does not await delays every request. A thread
regularly schedules a callback on the loop, and looks at the loop's stack if the callback does not
run in time:

    … asyncio ─► Supervised.send ─► StrategyRun._run ─► the strategy ─► (library) ─► where it is now
                 knows the holder          the user's frames

Python code such as `while True: pass` is interrupted by an exception that the interpreter raises in
that thread (`PyThreadState_SetAsyncExc`). The exception must hit no other code, so it is set only
while the innermost frame is the user's own, inside a `Supervised`: it is raised at the next jump or
call there, or at the latest in the `Supervised`, which passes it on. Looking and setting must be
atomic, so no other thread may run in between. Library code may hold a lock, so neither it nor the
router's own code is interrupted.

Code that blocks in C, such as `time.sleep`, cannot be interrupted: it is named and counted, and the
exception is raised when it returns. Code that holds the interpreter lock also stops this thread;
`microserve up` checks the router's health from outside.

If this thread itself wakes up late while the loop's thread uses no CPU time, the process was
stopped or its host is overloaded. That is reported, and nobody is charged with it: of the time
between two looks at most `LOOKED_S` counts, and none in which the loop's thread waits for a CPU.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType

from router.base import LATE_S
from router.supervision.interruption import interrupt
from router.supervision.supervised import Holder, Supervised
from router.supervision.user_frames import at, is_user, user_packages
from router.telemetry import Events, Metrics

__all__ = ["Watchdog"]

log = logging.getLogger(__name__)
LOOK_S = 0.02
LOOKED_S = 2 * LOOK_S
SAY_S = 10.0  # between two reports of an overloaded host
_SUPERVISED = (Supervised.send.__code__, Supervised.throw.__code__)


class Watchdog:
    """Watches the loop that it is made on; `limit_s` is how long the loop may be blocked."""

    def __init__(self, metrics: Metrics, limit_s: float, events: Events | None = None) -> None:
        self._metrics = metrics
        self._events = events or Events()
        self._limit_s = limit_s
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._native_id = threading.get_native_id()
        self._alive = threading.Event()
        self._stop = threading.Event()
        self._stalled_s = 0.0  # since the last report
        self._report_at = 0.0

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
        user_packages()  # to be known when it is urgent
        while not self._stop.is_set():
            self._alive.clear()
            try:
                self._loop.call_soon_threadsafe(self._alive.set)
            except RuntimeError:  # the loop is closed
                return
            if self._wait(self._alive, self._limit_s):
                self._wait(self._stop, self._limit_s)
            else:
                self._blocked(time.monotonic() - self._limit_s)

    def _blocked(self, since: float) -> None:
        """Look repeatedly until the loop runs; name and interrupt a holder seen again and again.

        A machine that is overloaded or was suspended looks the same, but not in many looks.
        """
        suspect: Holder | None = None
        named: list[Holder | None] = []
        looked, used, seen_s = time.monotonic(), self._used_s(), 0.0
        while not self._wait(self._alive, LOOK_S):
            frame = sys._current_frames().get(self._thread_id)
            supervised = _supervised_in(frame)
            found = supervised.holder if supervised is not None and _has_users(frame) else None
            now = time.monotonic()
            seen_s += self._held_s(min(now - looked, LOOKED_S), used)
            looked, used = now, self._used_s()
            if found is not suspect:
                suspect, seen_s = found, 0.0
            if seen_s < self._limit_s / 2:
                continue
            if suspect not in named:
                named.append(suspect)
                self._name(suspect, frame, now - since)
            if suspect is not None and supervised is not None:
                self._interrupt(supervised)
        if named:
            log.warning("the event loop runs again after %.2f s", time.monotonic() - since)

    def _wait(self, event: threading.Event, seconds: float) -> bool:
        """Wait for `event`, and report a stall of this process. Return whether it is set."""
        began, used = time.monotonic(), self._used_s()
        is_set = event.wait(seconds)
        late_s = time.monotonic() - began - seconds
        # A loop that uses CPU time may hold the interpreter lock, for which this thread waits.
        if late_s > LATE_S and self._used_s() - used < late_s / 2:
            self._stalled(late_s)
        return is_set

    def _used_s(self) -> float:
        """Return the CPU time that the loop's thread has used."""
        return time.clock_gettime(time.pthread_getcpuclockid(self._thread_id))

    def _held_s(self, seconds: float, used: float) -> float:
        """Return how long the loop's thread ran, or waited in a call, within the last `seconds`.

        `used` is the CPU time that it had used before. A thread that could run, but got no CPU
        time, holds up nothing.
        """
        ran = self._used_s() - used
        try:
            stat = Path(f"/proc/self/task/{self._native_id}/stat").read_text()
        except OSError:
            return max(ran, seconds)
        runnable = stat.rpartition(")")[2].split()[0] == "R"
        return ran if runnable else max(ran, seconds)

    def _stalled(self, seconds: float) -> None:
        self._metrics.host_stalls.inc()
        self._metrics.host_stalled_seconds.inc(seconds)
        self._stalled_s += seconds
        with suppress(RuntimeError):  # the loop is closed
            publish = partial(self._events.publish, "host", stalled_s=round(seconds, 3))
            self._loop.call_soon_threadsafe(publish)
        if (now := time.monotonic()) >= self._report_at:
            log.warning(
                "this process did not run for %.1f s: it was stopped, or the host is overloaded",
                self._stalled_s,
            )
            self._report_at, self._stalled_s = now + SAY_S, 0.0

    def _name(self, suspect: Holder | None, frame: FrameType | None, seconds: float) -> None:
        stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
        who = suspect.label if suspect is not None else "the router"
        log.error("%s holds up the event loop, for %.2f s so far:\n%s", who, seconds, stack)
        if suspect is not None:
            message = f"holds up the event loop ({at(frame)})"
            self._loop.call_soon_threadsafe(suspect.add_violation, "blocked", message)
        else:
            self._metrics.stalls.inc()

    def _interrupt(self, supervised: Supervised) -> None:
        def still_blocks(frame: FrameType) -> bool:
            theirs = is_user(frame) and _supervised_in(frame) is supervised
            return theirs and not self._alive.is_set()

        interrupt(self._thread_id, still_blocks)


def _supervised_in(frame: FrameType | None) -> Supervised | None:
    """Return the innermost `Supervised` on this stack."""
    while frame is not None:
        if frame.f_code in _SUPERVISED:
            supervised = frame.f_locals.get("self")
            return supervised if isinstance(supervised, Supervised) else None
        frame = frame.f_back
    return None


def _has_users(frame: FrameType | None) -> bool:
    """Return whether user code is on the stack inside the innermost `Supervised`."""
    while frame is not None and frame.f_code not in _SUPERVISED:
        if is_user(frame):
            return True
        frame = frame.f_back
    return False
