"""Raises an exception in a thread that runs user code.

The interpreter raises it at the thread's next jump or call (`PyThreadState_SetAsyncExc`). It must
hit the user's code only: library code may hold a lock.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

__all__ = ["Interrupted", "interrupt"]

UNINTERRUPTED_S = 0.1  # looking and setting take a thousandth of it
_lock = threading.Lock()  # else two threads would restore the interval in the wrong order


class Interrupted(BaseException):
    """Raised in user code that takes too long."""


def interrupt(thread_id: int, wanted: Callable[[FrameType], bool]) -> None:
    """Raise `Interrupted` in a thread if `wanted` accepts its innermost frame.

    Looking and setting must be atomic, so no other thread runs in between. Takes up to 0.1 s.
    """
    with _lock:
        before = sys.getswitchinterval()
        sys.setswitchinterval(UNINTERRUPTED_S)
        try:
            time.sleep(0)  # yield once: after that, the other thread waits by the new interval
            frame = sys._current_frames().get(thread_id)
            if frame is not None and wanted(frame):
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(thread_id), ctypes.py_object(Interrupted)
                )
        finally:
            sys.setswitchinterval(before)
