"""A circuit breaker: an engine whose calls fail one after another is left alone for a while."""

from __future__ import annotations

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

    What counts as a failure is the caller's to say: an engine that cannot be reached or fails by
    itself, never one that is full, and never a request that is wrong. `clock` gives seconds.
    """

    def __init__(self, failures: int, open_s: float, clock: Callable[[], float]) -> None:
        self.opened = 0  # how often
        self._limit = failures
        self._base_s = open_s
        self._clock = clock
        self._failures = 0  # in a row
        self._open_s = open_s  # of the last opening
        self._until: float | None = None  # open until then; `None`: closed
        self._trial_until = (
            0.0  # the trial of a half-open breaker: one that never ends is forgotten
        )

    @property
    def state(self) -> BreakerState:
        if self._until is None:
            return "closed"
        return "open" if self._clock() < self._until else "half_open"

    @property
    def resting(self) -> bool:
        """Whether to leave it alone: open, or half-open with its one trial under way."""
        state = self.state
        return state == "open" or (state == "half_open" and self._clock() < self._trial_until)

    def begin(self) -> None:
        """A call is made; of a half-open breaker it is the trial."""
        if self._until is not None:
            self._trial_until = self._clock() + self._base_s

    def success(self) -> None:
        """It has answered."""
        self._failures = 0
        self._until = None
        self._trial_until = 0.0

    def failure(self) -> bool:
        """It has not, by its own fault; whether that has opened the breaker just now."""
        self._failures += 1
        state = self.state
        if state == "open" or (state == "closed" and self._failures < self._limit):
            return False
        self._open_s = min(2 * self._open_s, LONGEST_S) if state == "half_open" else self._base_s
        self._until = self._clock() + self._open_s
        self._trial_until = 0.0
        self.opened += 1
        return True
