"""Time in which this process ran.

A process that is stopped, or gets no CPU time from its host, hears nothing from other processes.
That time says nothing about them, so it must not count when they are judged by their silence.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

__all__ = ["LATE_S", "AwakeClock", "fired_late"]

TICK_S = 0.25
LATE_S = 0.5  # what fires this late was held up in this process


def fired_late(timer: asyncio.TimerHandle) -> bool:
    """Return whether a timer, whose callback runs now, was held up in this process."""
    return asyncio.get_running_loop().time() - timer.when() > LATE_S


class AwakeClock:
    """Seconds in which this process ran, counted while `run` runs on its event loop.

    The loop ticks every `TICK_S`. Of the time since a tick at most `LATE_S` counts.
    """

    def __init__(
        self,
        *,
        on_stall: Callable[[float], object] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_stall` is told how late a tick is if that is more than `LATE_S`.

        `clock` returns monotonic seconds.
        """
        self._clock = clock
        self._on_stall = on_stall
        self._counted = 0.0
        self._ticked = clock()

    def __call__(self) -> float:
        return self._counted + min(self._clock() - self._ticked, LATE_S)

    async def run(self) -> None:
        """Tick until cancelled."""
        self._ticked = self._clock()
        while True:
            await asyncio.sleep(TICK_S)
            self.tick()

    def tick(self) -> None:
        """Count the time since the last tick."""
        gap = self._clock() - self._ticked
        self._counted, self._ticked = self(), self._ticked + gap
        if gap > TICK_S + LATE_S:
            self._on_stall(gap - TICK_S)
