"""Pauses between tries that have failed."""

from __future__ import annotations

import random

__all__ = ["Pauses"]


class Pauses:
    """Pauses between tries, each twice as long as the one before, from `first_s` to `longest_s`.

    Each is shorter by up to a fifth at random, so that tries of many routers spread out.
    """

    def __init__(self, first_s: float, longest_s: float) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._next_s = first_s

    def next(self) -> float:
        """Return the next pause in seconds."""
        pause, self._next_s = self._next_s, min(2 * self._next_s, self._longest_s)
        return pause * (1.0 - 0.2 * random.random())  # noqa: S311  no secret

    def reset(self) -> None:
        self._next_s = self._first_s
