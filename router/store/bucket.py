"""A token bucket."""

from __future__ import annotations

__all__ = ["Bucket"]

MINUTE_S = 60.0


class Bucket:
    """A token bucket that fills evenly, up to one minute's worth.

    It can be overdrawn by amounts known only afterwards; it then refills from below zero.
    """

    __slots__ = ("_level", "_per_s", "_then", "limit")

    def __init__(self, limit: int, now: float) -> None:
        self.limit = limit
        self._per_s = limit / MINUTE_S
        self._level = float(limit)
        self._then = now

    def level(self, now: float) -> float:
        filled = self._level + (now - self._then) * self._per_s
        self._level, self._then = min(filled, float(self.limit)), now
        return self._level

    def take(self, amount: float, now: float) -> None:
        self._level = self.level(now) - amount

    def set(self, level: float, now: float) -> None:
        """Set what it holds, as another bucket of the same limit does."""
        self._level, self._then = level, now

    def until(self, amount: float, now: float) -> float:
        """Return the seconds until it holds `amount`."""
        return max(0.0, (amount - self.level(now)) / self._per_s)
