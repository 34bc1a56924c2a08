"""Own pages that a peer fills with whole pages of KV: blocks that come home from a creditor.

    open ──► a peer claims the slot and writes ──► take ──► the pages are the caller's
      └──────────────┴──► abandon ──► free, or in quarantine while a write is in flight

A receive lease is for a prompt and is started or committed. A landing is for any KV, and whoever
opened it knows what it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvcache.errors import KVIncomplete, NoCapacity
from kvcache.lease.control_slots import LANDED
from kvcache.lease.receiver import LeaseReceiver
from kvcache.types import LeaseId, PageId, SlotIndex

__all__ = ["Landing", "Landings"]


@dataclass(frozen=True, slots=True, eq=False)
class Landing:
    """Pages of this pool that wait for their KV."""

    pages: tuple[PageId, ...]
    slot: SlotIndex
    nonce: int  # in that slot while the landing is open


class Landings:
    """The open landings of one cache. The cache's lock guards it."""

    def __init__(self, receiver: LeaseReceiver) -> None:
        """Landings take their pages, slots and addresses where receive leases do."""
        self._receiver = receiver
        self._slots = receiver.leases.slots
        self._open: set[Landing] = set()

    def open(self, pages: Sequence[PageId]) -> Landing:
        """Let a peer write into `pages`, of which the landing takes over the references.

        Raises `NoCapacity`, taking over nothing, if no control slot is free.
        """
        if not pages:
            raise NoCapacity("a landing has at least one page")
        landing = Landing(tuple(pages), *self._slots.open(0))
        self._open.add(landing)
        return landing

    def address(self, landing: Landing) -> str:
        """Return the signed address of a landing; its positions count from 0 in its pages."""
        return self._receiver.address(
            LeaseId(f"landing {landing.nonce}"),
            landing.slot,
            landing.nonce,
            landing.pages,
            room=self._tokens(landing),
        )

    def landed(self, landing: Landing) -> bool:
        """Whether all pages of an open landing have their KV."""
        slots = self._slots.control.slots
        return int(slots[landing.slot, LANDED]) >= self._tokens(landing)

    def take(self, landing: Landing) -> list[PageId]:
        """End a landing; return its pages, whose references are the caller's from now on.

        Raises `KVIncomplete` if not all KV has landed, or the peer may still write. The landing
        stays open then.
        """
        if not self.landed(landing):
            raise KVIncomplete("not all pages have landed")
        self._slots.take_over(landing.slot)
        self._open.discard(landing)
        return list(landing.pages)

    def abandon(self, landing: Landing) -> list[PageId]:
        """End a landing; return the pages that nobody writes into. Others go to quarantine.

        The caller drops the pages. A landing that has ended has none.
        """
        if landing not in self._open:
            return []
        self._open.discard(landing)
        return self._slots.close(landing.slot, list(landing.pages))

    def holders(self) -> Iterator[Sequence[PageId]]:
        """Yield the pages of open landings, to prove ownership."""
        for landing in self._open:
            yield landing.pages

    def _tokens(self, landing: Landing) -> int:
        return len(landing.pages) * self._receiver.page_size
