"""The stages of a pipeline: batches pass them one after the other, in the order of entry."""

from __future__ import annotations

__all__ = ["Stages"]


class Stages:
    """Stages that serve one batch at a time each. A batch takes as long in each of them."""

    def __init__(self, count: int) -> None:
        self._free = [0.0] * count  # when each stage has served what entered so far

    @property
    def count(self) -> int:
        """The number of stages."""
        return len(self._free)

    @property
    def free_s(self) -> float:
        """The time from which the first stage takes another batch."""
        return self._free[0]

    def enter(self, ready_s: float, seconds: float, extra_s: float = 0.0) -> float:
        """Send a batch through, and return when the last stage has served it.

        It takes `seconds` in each stage, and `extra_s` more in the first one.
        """
        at = max(ready_s, self._free[0]) + seconds + extra_s
        self._free[0] = at
        for stage in range(1, len(self._free)):
            at = max(at, self._free[stage]) + seconds
            self._free[stage] = at
        return at
