"""Programs of ours as processes that start in a fraction of a second, at a time of their own."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from router.conformance.forkserver import Forked, Program, microserve
from router.conformance.forkserver import engine as run_engine

__all__ = ["Forked", "Program", "engine", "microserve"]


def engine(flags: Sequence[str]) -> None:
    """`python -m engine`.

    With `WALL_CLOCK` in its environment, a file with a number, its wall clock is so many seconds
    off.
    """
    if clock := os.environ.get("WALL_CLOCK"):
        _shift_wall_clock(Path(clock))
    run_engine(flags)


def _shift_wall_clock(offset: Path) -> None:
    """The wall clock is off by the seconds in the file from now on, also when they change; the
    monotonic clocks are left alone."""
    real_ns, real_clock = time.time_ns, time.clock_gettime

    def shifted_ns() -> int:
        return real_ns() + round(float(offset.read_text()) * 1e9)

    def clock_gettime(clock: int) -> float:
        return shifted_ns() / 1e9 if clock == time.CLOCK_REALTIME else real_clock(clock)

    time.time_ns, time.clock_gettime = shifted_ns, clock_gettime
    time.time = lambda: shifted_ns() / 1e9
