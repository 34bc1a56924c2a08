"""Write rights as the threads of one process hold them: one right per slot of a region."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["WriteRights"]


class WriteRights:
    """Who of this process has which slot's right; nobody ever waits for one.

    A right is taken alone, or under a number (the sender's claim): all who give the same number
    may have it together.
    """

    def __init__(
        self,
        take: Callable[[int, int], bool] = lambda slot, share: True,
        drop: Callable[[int], None] = lambda slot: None,
    ) -> None:
        """`take(slot, share)` gets a right from other processes, for the first who has it here;
        `drop(slot)` gives it back to them, after the last."""
        self._take, self._drop = take, drop
        self._held: dict[int, tuple[int, int]] = {}  # slot: the number or 0, how many
        self._lock = threading.Lock()

    def try_right(self, slot: int, share: int = 0) -> bool:
        """Take a right, alone or with those who give the same number; False if it is not free."""
        with self._lock:
            held = self._held.get(slot)
            if held is not None:
                number, holders = held
                if not share or number != share:
                    return False
                self._held[slot] = number, holders + 1
                return True
            if not self._take(slot, share):
                return False
            self._held[slot] = share, 1
            return True

    def drop_right(self, slot: int) -> None:
        """Give it back."""
        with self._lock:
            number, holders = self._held.pop(slot)
            if holders > 1:
                self._held[slot] = number, holders - 1
            else:
                self._drop(slot)
