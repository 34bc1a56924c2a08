"""Finds the user's lines in stacks and tracebacks.

A frame is *ours* (this project), a *library's* (the standard library, installed packages), or the
*user's*: a strategy, and the modules that it imports from beside it. An installed package that has
a strategy is the user's too.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterator
from functools import cache
from importlib.metadata import entry_points
from logging import LogRecord
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any

__all__ = [
    "asked_by_user",
    "at",
    "is_ours",
    "is_user",
    "is_user_record",
    "line_in",
    "user_packages",
    "waits_at",
]

OURS = frozenset({"router", "engine", "kvcache"})
_SOURCE = Path(__file__).parents[2]
_OUR_FOLDERS = tuple(f"{_SOURCE / name}/" for name in OURS)
_PATHS = sysconfig.get_paths()
_LIBRARIES = tuple({_PATHS[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def is_ours(frame: FrameType) -> bool:
    return _package(frame) in OURS


def is_user(frame: FrameType) -> bool:
    return not is_ours(frame) and not _is_library(frame)


def is_user_record(record: LogRecord) -> bool:
    """Return whether the user's code logged this record."""
    path = record.pathname
    return not path.startswith(_OUR_FOLDERS) and (
        not _is_library_file(path) or _package_of_file(path) in user_packages()
    )


def asked_by_user(frame: FrameType | None) -> bool:
    """Return whether the innermost frame of this stack outside of libraries is the user's."""
    while frame is not None:
        if is_ours(frame):
            return False
        if not _is_library(frame):
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


def _is_library(frame: FrameType) -> bool:
    return _is_library_file(frame.f_code.co_filename) and _package(frame) not in user_packages()


def _is_library_file(path: str) -> bool:
    return path.startswith((*_LIBRARIES, "<frozen "))


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _package_of_file(path: str) -> str:
    """Return the top-level package or module of a file in a folder of libraries."""
    folder = max((one for one in _LIBRARIES if path.startswith(one)), key=len, default="")
    return path.removeprefix(folder).strip("/").partition("/")[0].removesuffix(".py")


@cache
def user_packages() -> frozenset[str]:
    """Return the installed packages that have strategies. The first call reads files."""
    entries = entry_points(group="microserve.strategies")
    return frozenset(entry.module.partition(".")[0] for entry in entries)


def _line(code: CodeType, line: int) -> str:
    return f"{Path(code.co_filename).name}:{line}"
