"""Processes as owners of work on a device: which one it is, and whether anything of it is left."""

from __future__ import annotations

import os
import select
import weakref
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

__all__ = ["Process", "is_over", "start_time", "this_process"]


class Process:
    """A process that may end at any time. Asking whether it has takes a microsecond."""

    def __init__(self, pid: int) -> None:
        self._pid, self._handle = pid, -1
        with suppress(OSError):  # without the process, or in a kernel without pidfd_open
            self._handle = os.pidfd_open(pid)
            weakref.finalize(self, os.close, self._handle)
        self._started = start_time(pid)

    def is_over(self) -> bool:
        """Return whether nothing is left of the process, as the function `is_over`."""
        if self._handle < 0:
            return is_over(self._pid, self._started)
        return _has_ended(self._handle)


def start_time(pid: int) -> int:
    """Return when a process started, in clock ticks since the boot; 0 if there is none.

    No two processes of a boot have the same number and the same time.
    """
    fields = _stat(pid)
    return int(fields[19]) if fields else 0


def this_process() -> tuple[int, int]:
    """Return the number and the start time of this process."""
    return _this(os.getpid())


def is_over(pid: int, started: int) -> bool:
    """Return whether all threads of a process have ended, and it holds no file any more.

    By then the driver of a device has torn down what the process had there. A process with the
    same number that started at another time is another one.
    """
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):  # a kernel without pidfd_open, no descriptor, no such number
        return _is_other(pid, started) or _is_zombie(pid)
    try:
        # The number stays with one process for as long as the descriptor is open.
        return _is_other(pid, started) or _has_ended(handle)
    finally:
        os.close(handle)


@lru_cache(maxsize=1)
def _this(pid: int) -> tuple[int, int]:
    return pid, start_time(pid)


def _is_other(pid: int, started: int) -> bool:
    """Whether the process of this number started at another time. Times of 0 are unknown."""
    now = start_time(pid)
    return bool(started and now) and now != started


def _has_ended(handle: int) -> bool:
    """Whether the last thread of a process has ended. The kernel tells it after it closed files."""
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    return bool(poll.poll(0))


def _is_zombie(pid: int) -> bool:
    """Whether the last thread of a process has ended; also if nothing is left of it."""
    fields = _stat(pid)
    if not fields:
        return _is_gone(pid)
    try:
        threads = os.listdir(f"/proc/{pid}/task")  # noqa: PTH208
    except FileNotFoundError:
        return True
    except OSError:  # no descriptor is free: nothing is known
        return False
    return fields[0] in ("Z", "X") and len(threads) < 2


def _is_gone(pid: int) -> bool:
    """Whether there is no process of this number, not even a zombie. Needs no descriptor."""
    try:
        os.stat(f"/proc/{pid}")  # noqa: PTH116
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:
        return False
    return False


def _stat(pid: int) -> list[str]:
    """Return the fields of `/proc/PID/stat` from the state on; none if it cannot be read."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
