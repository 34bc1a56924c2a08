"""Finds the user's lines in stacks and tracebacks.

A frame is *ours* (this project), a *library's* (the standard library, installed packages), or the
*user's*: a strategy, and the modules that it imports from beside it.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any

__all__ = ["asked_by_user", "at", "is_ours", "is_user", "line_in", "waits_at"]

OURS = frozenset({"router", "engine", "kvcache"})
_PATHS = sysconfig.get_paths()
_LIBRARIES = tuple({_PATHS[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in OURS


def is_user(frame: FrameType) -> bool:
    return not is_ours(frame) and not _is_library(frame.f_code)


def asked_by_user(frame: FrameType | None) -> bool:
    """Return whether the innermost frame of this stack outside of libraries is the user's."""
    while frame is not None:
        if is_ours(frame):
            return False
        if not _is_library(frame.f_code):
            return True
        frame = frame.f_back
    return False


def line_in(traceback: TracebackType | None) -> str:
    """Return the user's innermost line that an exception passed, as `file.py:12`, or ""."""
    found = ""
    while traceback is not None:
        if is_user(traceback.tb_frame):
            found = _line(traceback.tb_frame.f_code, traceback.tb_lineno)
        traceback = traceback.tb_next
    return found


def waits_at(awaited: Any) -> str:
    """Return the user's innermost line in which a suspended coroutine waits, or ""."""
    found = ""
    for frame in _suspended(awaited):
        if is_user(frame):
            found = _line(frame.f_code, frame.f_lineno)
    return found


def at(frame: FrameType | None) -> str:
    """Return the user's innermost line of a running stack, as `file.py:12`, or ""."""
    while frame is not None:
        if is_user(frame):
            return _line(frame.f_code, frame.f_lineno)
        frame = frame.f_back
    return ""


def _suspended(awaited: Any) -> Iterator[FrameType]:
    for _ in range(sys.getrecursionlimit()):
        for prefix in ("cr", "ag", "gi"):
            if (frame := getattr(awaited, f"{prefix}_frame", None)) is not None:
                yield frame
                awaited = getattr(awaited, f"{prefix}_await", None) or getattr(
                    awaited, f"{prefix}_yieldfrom", None
                )
                break
        else:
            return


def _is_library(code: CodeType) -> bool:
    return code.co_filename.startswith((*_LIBRARIES, "<frozen "))


def _line(code: CodeType, line: int) -> str:
    return f"{Path(code.co_filename).name}:{line}"
