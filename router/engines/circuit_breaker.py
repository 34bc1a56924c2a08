"""A circuit breaker: an engine whose calls fail one after another is left alone for a while."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, get_args

__all__ = ["BREAKER_STATES", "BreakerState", "CircuitBreaker"]

BreakerState = Literal["closed", "half_open", "open"]
BREAKER_STATES: tuple[BreakerState, ...] = get_args(BreakerState)  # 0, 1, 2 in the metrics
LONGEST_S = 60.0


class CircuitBreaker:
    """closed ── `failures` in a row ──► open ── `open_s` ──► half-open ── one trial ──► closed
                                          ▲                                    │
                                          └──────── failed: twice as long ─────┘

    The caller decides what counts as a failure: an engine that cannot be reached or fails by
    itself, never a full engine, and never a bad request. `clock` returns seconds.
    """

    def __init__(self, failures: int, open_s: float, clock: Callable[[], float]) -> None:
        self.opened = 0  # how often it has opened
        self._limit = failures
        self._base_s = open_s
        self._longest_s = max(open_s, LONGEST_S)
        self._clock = clock
        self._failures = 0  # in a row
        self._open_s: float  # duration of the last opening
        self._until: float | None = None  # open until then; `None`: closed
        self._trial_until = -math.inf  # when the trial of a half-open breaker is given up

    @property
    def state(self) -> BreakerState:
        if self._until is None:
            return "closed"
        return "open" if self._clock() < self._until else "half_open"

    @property
    def resting(self) -> bool:
        """Whether to leave the engine alone: open, or half-open with its one trial under way."""
        if self._until is None:
            return False
        return self._clock() < max(self._until, self._trial_until)

    def begin(self) -> None:
        """Note that a call begins; on a half-open breaker it is the trial."""
        if self._until is not None:
            self._trial_until = self._clock() + self._base_s

    def success(self) -> None:
        """Note that the engine answered."""
        self._failures = 0
        self._until = None

    def failure(self) -> bool:
        """Note that a call failed by the engine's fault; return whether this opened the breaker."""
        self._failures += 1
        state = self.state
        if state == "open" or (state == "closed" and self._failures < self._limit):
            return False
        half_open = state == "half_open"
        self._open_s = min(2 * self._open_s, self._longest_s) if half_open else self._base_s
        self._until = self._clock() + self._open_s
        self.opened += 1
        return True

    def trip(self) -> bool:
        """Note a failure that is enough to open the breaker; return whether it opened."""
        self._failures = max(self._failures, self._limit - 1)
        return self.failure()
