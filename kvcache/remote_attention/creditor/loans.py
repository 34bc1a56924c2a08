"""Which pages of the creditor a debtor may attend to: those of its live loans."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

from kvcache.lending import Lender
from kvcache.types import EngineId, LeaseId, PageId

__all__ = ["Allowed", "Debtor", "PagesOfLoans"]


class Debtor(NamedTuple):
    """One process of an engine that borrows pages."""

    engine_id: EngineId
    epoch: int


class Allowed(Protocol):
    """Whether pages belong to a live loan of a debtor. Called by the creditor's thread."""

    def __call__(self, debtor: Debtor, loan: LeaseId, pages: frozenset[PageId]) -> bool:
        """Return whether all `pages` belong to this loan, and the loan is live now."""
        ...


class PagesOfLoans:
    """`Allowed` by the accounts of a `Lender`.

    A loan is live here as long as the lender has it. Its pages are not the pool's again before
    that, so what was computed over them is right, also past the loan's deadline.
    """

    def __init__(self, lender: Lender, lock: AbstractContextManager[object]) -> None:
        """`lock` guards the lender."""
        self._lender, self._lock = lender, lock

    def __call__(self, debtor: Debtor, loan: LeaseId, pages: frozenset[PageId]) -> bool:
        with self._lock:
            found = self._lender.loan(debtor.engine_id, loan)
            if found is None or found.epoch != debtor.epoch:
                return False
            return pages.issubset(found.pages)
