"""A limit on the bytes of request bodies in a process."""

from __future__ import annotations

import sys

__all__ = ["BodyBudget"]


class BodyBudget:
    """Counts the received bytes that wait to be parsed, of all connections together."""

    __slots__ = ("_limit", "used")

    def __init__(self, limit: int = sys.maxsize) -> None:
        """`limit`: bytes."""
        self._limit = limit
        self.used = 0

    def take(self, size: int) -> bool:
        """Count `size` more bytes. Return False, and count nothing, if they exceed the limit."""
        if self.used + size > self._limit:
            return False
        self.used += size
        return True

    def give(self, size: int) -> None:
        """Count `size` bytes less."""
        self.used -= size
