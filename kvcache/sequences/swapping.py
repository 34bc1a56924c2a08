"""The part of the tiers that the sequence table uses: room for sequences that leave the device."""

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
    out: Future[int]  # done when it has left; the result is its length in tokens

    @property
    def moving(self) -> bool:
        """Whether it is being copied."""
        ...

    def copy_in(
        self, pages: list[PageId], on_end: Callable[[list[PageId], int], None]
    ) -> Future[int]:
        """Copy it into `pages`; at the end call `on_end` with them and the restored length."""
        ...

    def abandon(self) -> None:
        """Release its room, at once or after the page that is being copied."""
        ...


class SwapSpace(Protocol):
    """Room for swapped sequences."""

    def swap_out(self, pages: list[PageId], length: int) -> SwappedSequence:
        """Start to copy a sequence's pages out, and take over the references to them.

        Raises `NoCapacity` without room, changing nothing.
        """
        ...

    def forget(self, swap: SwappedSequence) -> None:
        """Drop the record of a sequence that has returned or was removed."""
        ...


class NoSwapSpace:
    """A `SwapSpace` without room."""

    def swap_out(self, pages: list[PageId], length: int) -> SwappedSequence:
        """Raise `NoCapacity`."""
        raise NoCapacity(f"no tier has room for {len(pages)} pages")

    def forget(self, swap: SwappedSequence) -> None:
        """Do nothing."""
