"""Write rights over the slots of a region, among the threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvcache.types import SlotIndex

__all__ = ["WriteRights"]


class WriteRights:
    """The holders of each slot's right in this process. Thread-safe; no call waits for a holder.

    A right is held exclusively, or shared by all holders that pass the same number, the claim of
    their sender.
    """

    def __init__(
        self,
        take: Callable[[int, int], bool] = lambda slot, share: True,
        drop: Callable[[int], None] = lambda slot: None,
    ) -> None:
        """`take(slot, share)` acquires a right among processes, before its first holder here;
        `drop(slot)` releases it, after the last."""
        self._take, self._drop = take, drop
        self._held: dict[int, tuple[int, int]] = {}  # by slot: number or 0, count of holders
        self._lock = threading.Lock()

    def try_acquire_right(self, slot: SlotIndex, share: int = 0) -> bool:
        """Acquire a right and return True; return False if it is held.

        With `share`, holders that pass the same number share it.
        """
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

    def release_right(self, slot: SlotIndex) -> None:
        """Release a right that this process holds."""
        with self._lock:
            number, holders = self._held.pop(slot)
            if holders > 1:
                self._held[slot] = number, holders - 1
            else:
                self._drop(slot)
