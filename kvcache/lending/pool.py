"""What a lender needs of a pool: its pages, and who may still write into them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvcache.types import PageId, SlotIndex

__all__ = ["LendablePages", "LoanSlots", "NoWriters"]


class LendablePages(Protocol):
    """The pages of a pool. `kvcache.pages.PageManager` implements it; so may any other pool."""

    @property
    def available(self) -> int:
        """An upper bound of the pages that `take` can get."""
        ...

    def take(self, count: int, *, leaving: int = 0) -> list[PageId]:
        """Take `count` pages, one reference each. Raises `NoCapacity`, changing nothing.

        It does so also if fewer than `leaving` pages would be available afterwards.
        """
        ...

    def drop(self, pages: Sequence[PageId]) -> None:
        """Drop a reference to each of `pages`."""
        ...


class LoanSlots(Protocol):
    """The write rights over lent pages. `kvcache.lease.WriteSlots` implements it.

    A debtor that keeps KV in lent pages (distributed attention) puts it there as into a receive
    lease: it claims the loan's slot, whose number and nonce its signed address has. So the pages of
    an ended loan are quarantined like those of a lease while a put into them may be in flight.
    """

    def open(self, landed: int) -> tuple[SlotIndex, int]:
        """Open a slot with this watermark; return it and its nonce. Raises `NoCapacity`."""
        ...

    def close(self, slot: SlotIndex, pages: list[PageId]) -> list[PageId]:
        """Close a slot; return the pages that nobody writes into, and quarantine the others."""
        ...


class NoWriters:
    """The `LoanSlots` of pages that no peer can write."""

    def open(self, landed: int) -> tuple[SlotIndex, int]:
        """Return the same slot for all loans."""
        return SlotIndex(0), 0

    def close(self, slot: SlotIndex, pages: list[PageId]) -> list[PageId]:
        """Return all pages."""
        return pages
