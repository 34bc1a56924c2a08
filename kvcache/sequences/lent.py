"""Pages that the pool has lent, as far as its own sequences want them back."""

from __future__ import annotations

from typing import Protocol

__all__ = ["LentPages", "NothingLent"]


class LentPages(Protocol):
    """Loans of the pool's pages. `kvcache.lending.Lender` implements it."""

    @property
    def lent(self) -> int:
        """Pages of all loans."""
        ...

    @property
    def awaited(self) -> int:
        """Pages that were called back and are still lent."""
        ...

    def call_back(self, count: int) -> object:
        """Call back loans of `count` pages or more in all; those called back earlier count."""
        ...


class NothingLent:
    """The `LentPages` of a pool without loans."""

    lent = awaited = 0

    def call_back(self, count: int) -> None:
        """Do nothing."""
