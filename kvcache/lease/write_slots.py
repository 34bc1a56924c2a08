"""The control slots of one pool: which writers may still write which pages.

    open ──► a peer may claim the slot and write ──► close ──► the pages are free, or QUARANTINED
                                                               until no write can be in flight

Receive leases and loans each hold a slot. A slot is closed by clearing its nonce: every later write
is refused then, and a write in flight holds the slot's write right. Quarantine ends by that proof,
never by time.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator

from kvcache.errors import KVIncomplete, NoCapacity
from kvcache.lease.control_slots import CLAIM, LANDED, NONCE, RENEWALS, SLOTS, ControlSlots
from kvcache.types import PageId, SlotIndex

__all__ = ["WriteSlots"]


class WriteSlots:
    """The open and the free slots, and the pages in quarantine. The cache's lock guards it."""

    def __init__(self, control: ControlSlots) -> None:
        self.control = control
        self._free = [SlotIndex(slot) for slot in range(SLOTS - 1, -1, -1)]
        self._quarantine: list[tuple[SlotIndex, list[PageId]]] = []

    @property
    def free(self) -> int:
        """Number of slots that can be opened."""
        return len(self._free)

    @property
    def quarantined(self) -> int:
        """Pages in quarantine."""
        return sum(len(pages) for _, pages in self._quarantine)

    def open(self, landed: int) -> tuple[SlotIndex, int]:
        """Open a slot whose watermark is `landed`; return it and its nonce.

        Raises `NoCapacity` if all slots are open, in quarantine, or held by late senders. Such a
        sender takes the right before it finds the nonce gone, and may be stopped in between.
        """
        slot = next((slot for slot in reversed(self._free) if self._writer_is_gone(slot)), None)
        if slot is None:
            raise NoCapacity(f"{SLOTS} loans and receive leases are open")
        self._free.remove(slot)
        nonce = secrets.randbits(63) | 1
        words = self.control.slots[slot]
        words[CLAIM] = words[RENEWALS] = 0
        words[LANDED] = landed
        words[NONCE] = nonce  # written last: a sender may claim from here on
        return slot, nonce

    def close(self, slot: SlotIndex, pages: list[PageId]) -> list[PageId]:
        """Close a slot: no write into `pages`, on its behalf, can begin any more.

        Return the pages if no write is in flight. Otherwise they and the slot go to quarantine, and
        a later `sweep` returns the pages.
        """
        self.control.slots[slot, NONCE] = 0
        if self._writer_is_gone(slot):
            self._free.append(slot)
            return pages
        self._quarantine.append((slot, pages))
        return []

    def take_over(self, slot: SlotIndex) -> None:
        """Close a slot whose pages are used on.

        Raises `KVIncomplete` if a write is in flight; slot and writer are then unaffected.
        """
        if not self.control.try_acquire_right(slot):
            raise KVIncomplete("a sender is still writing into this lease")
        self.control.slots[slot, NONCE] = 0
        self.control.release_right(slot)
        self._free.append(slot)

    def sweep(self) -> list[PageId]:
        """Return the pages that have left quarantine."""
        free: list[PageId] = []
        waiting = []
        for slot, pages in self._quarantine:
            if self._writer_is_gone(slot):
                self._free.append(slot)
                free += pages
            else:
                waiting.append((slot, pages))
        self._quarantine = waiting
        return free

    def holders(self) -> Iterator[list[PageId]]:
        """Yield the pages in quarantine, to prove ownership."""
        for _, pages in self._quarantine:
            yield pages

    def _writer_is_gone(self, slot: SlotIndex) -> bool:
        """Whether no write into a closed slot is in flight; none can begin any more."""
        if not self.control.try_acquire_right(slot):
            return False
        self.control.release_right(slot)
        return True
