"""The share of its time that a creditor computes for debtors (a cap per lender)."""

from __future__ import annotations

from collections.abc import Callable

from kvcache.errors import BadRequest

__all__ = ["ComputeBudget"]


class ComputeBudget:
    """A token bucket of seconds, which counts while the creditor has requests of its own.

    It fills by `share` seconds per second, up to `burst_s`. A computation may begin while it
    is not empty, and takes out its time when it ends. So over a time T in which the creditor is
    busy the computations take at most `share·T + burst_s`, plus the last of them: its own steps
    take at most 1/(1 − share) times as long. While it is not busy nothing is bounded, and the
    bucket is full. (Infinite-LLM bounds what a creditor lends by the requests that it serves
    itself, section 4.6.)
    """

    def __init__(
        self,
        share: float,
        burst_s: float,
        clock: Callable[[], float],
        busy: Callable[[], bool] = lambda: True,
    ) -> None:
        """`clock` returns monotonic seconds, `busy` whether the creditor has requests of its own.

        Raises `BadRequest` for a share outside (0, 1], or a burst that is not above 0.
        """
        if not 0 < share <= 1 or not burst_s > 0:
            raise BadRequest("a creditor computes for a share in (0, 1], in bursts above 0 s")
        self._share, self._burst_s, self._clock, self._busy = share, burst_s, clock, busy
        self._left, self._at = burst_s, clock()

    def wait_s(self) -> float:
        """Return how long the next computation has to wait, in seconds."""
        self._fill()
        return max(0.0, -self._left / self._share)

    def spend(self, seconds: float) -> None:
        """Take out the time of a computation."""
        self._fill()
        self._left -= seconds

    def _fill(self) -> None:
        now = self._clock()
        filled = self._left + self._share * (now - self._at) if self._busy() else self._burst_s
        self._left = min(self._burst_s, filled)
        self._at = now
