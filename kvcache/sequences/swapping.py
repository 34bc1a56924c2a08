"""What the sequence table needs of the tiers: a place for sequences that leave the device."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from kvcache.errors import NoCapacity
from kvcache.types import PageId

__all__ = ["NoSwapSpace", "SwapSpace", "SwappedSequence"]


class SwappedSequence(Protocol):
    """A sequence that has left the device, or is on its way there or back."""

    length: int
    out: Future[int]  # done when it has left, with the length that was kept

    @property
    def moving(self) -> bool:
        """Whether it is being copied."""
        ...

    def copy_in(
        self, pages: list[PageId], on_end: Callable[[list[PageId], int], None]
    ) -> Future[int]:
        """Copy it into `pages`; at the end pass them to `on_end` with the restored length."""
        ...

    def abandon(self) -> None:
        """Give it up."""
        ...


class SwapSpace(Protocol):
    """Room for swapped sequences."""

    def swap_out(self, pages: list[PageId], length: int) -> SwappedSequence:
        """Copy a sequence's pages, whose references are given. Raises `NoCapacity`."""
        ...

    def forget(self, swap: SwappedSequence) -> None:
        """Drop the record of a sequence that is back or was removed."""
        ...


class NoSwapSpace:
    """A `SwapSpace` without room."""

    def swap_out(self, pages: list[PageId], length: int) -> SwappedSequence:
        """Raise `NoCapacity`."""
        raise NoCapacity(f"no tier has room for {len(pages)} pages")

    def forget(self, swap: SwappedSequence) -> None:
        """Do nothing."""
