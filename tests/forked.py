"""Engine and router processes that start fast; engines with an adjustable wall clock."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Sequence
from pathlib import Path

from router.conformance import forkserver
from router.conformance.forkserver import ForkedProcess, Program, run_microserve

__all__ = ["ForkedProcess", "Program", "run_engine", "run_microserve", "run_with_few_files"]


def run_engine(flags: Sequence[str]) -> None:
    """Run `python -m engine`.

    The environment variable `WALL_CLOCK` names a file with the offset of its wall clock (s).
    """
    if clock := os.environ.get("WALL_CLOCK"):
        _shift_wall_clock(Path(clock))
    forkserver.run_engine(flags)


def _shift_wall_clock(offset: Path) -> None:
    """Shift the wall clock by the seconds in the file, read anew each time.

    The monotonic clocks do not change.
    """
    real_ns, real_clock = time.time_ns, time.clock_gettime

    def shifted_ns() -> int:
        return real_ns() + round(float(offset.read_text()) * 1e9)

    def clock_gettime(clock: int) -> float:
        return shifted_ns() / 1e9 if clock == time.CLOCK_REALTIME else real_clock(clock)

    time.time_ns, time.clock_gettime = shifted_ns, clock_gettime
    time.time = lambda: shifted_ns() / 1e9


def run_with_few_files(flags: Sequence[str]) -> None:
    """Run an engine or a router that may open as many files as the variable `OPEN_FILES` says."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, int(os.environ["OPEN_FILES"])))
    program, *rest = flags
    if program == "engine":
        run_engine(rest)
    else:
        run_microserve(flags)
