"""Which pages of the creditor a debtor may attend to: those of its live loans."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

from kvcache.lending import Lender
from kvcache.types import EngineId, LeaseId, PageId

__all__ = ["BadLoans", "Debtor", "PagesOfLoans"]


class Debtor(NamedTuple):
    """One process of an engine that borrows pages."""

    engine_id: EngineId
    epoch: int


class BadLoans(Protocol):
    """Finds the loans whose pages a debtor may not use. Called by the creditor's thread."""

    def __call__(
        self, debtor: Debtor, pages_of: Mapping[LeaseId, frozenset[PageId]]
    ) -> tuple[LeaseId, ...]:
        """Return those that are no live loans of this debtor, or do not have all these pages."""
        ...


class PagesOfLoans:
    """`BadLoans` by the accounts of a `Lender`.

    A loan is live here as long as the lender has it. Its pages are not the pool's again before
    that, so what was computed over them is right, also past the loan's deadline.
    """

    def __init__(self, lender: Lender, lock: AbstractContextManager[object]) -> None:
        """`lock` guards the lender."""
        self._lender, self._lock = lender, lock

    def __call__(
        self, debtor: Debtor, pages_of: Mapping[LeaseId, frozenset[PageId]]
    ) -> tuple[LeaseId, ...]:
        bad = []
        with self._lock:
            for loan, pages in pages_of.items():
                found = self._lender.loan(debtor.engine_id, loan)
                if found is None or found.epoch != debtor.epoch or not pages.issubset(found.pages):
                    bad.append(loan)
        return tuple(bad)
