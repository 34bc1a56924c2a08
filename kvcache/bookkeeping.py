"""The bookkeeping of one cache: who holds which page. It uses no torch, no thread and no clock.

Bookkeeping decides; page stores execute. `sequences` describes steps and page copies as plain data,
and a page store applies them to page contents. The caller passes a clock. Beyond its own state,
bookkeeping reads and writes only the control slots, which lie in memory that peers write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from kvcache.errors import Internal
from kvcache.lease.control_slots import ControlSlots
from kvcache.lease.identity import Identity
from kvcache.lease.landings import Landings
from kvcache.lease.receiver import LeaseReceiver
from kvcache.lending import Lender, Loan
from kvcache.pages.page_manager import PageManager
from kvcache.sequences.table import SequenceTable
from kvcache.shard import Shard
from kvcache.types import EngineId, LeaseId, PageId

__all__ = ["LOAN_S", "Bookkeeping", "PageUse"]

LOAN_S = 30.0


@dataclass(frozen=True, slots=True)
class PageUse:
    """Pages by owner, adding up to `total`; `pinned` ones are cached or active as well."""

    total: int
    free: int
    cached: int
    leased: int
    active: int
    quarantined: int
    lent: int
    pinned: int


class Bookkeeping:
    """Pages, sequences, receive leases, landings and loans. `KVCache` guards it by its lock."""

    def __init__(
        self,
        pages: int,
        page_size: int,
        *,
        slots: ControlSlots,
        endpoint: Callable[[], str],
        shards: tuple[Shard, ...] = (),
        identity: Identity,
        clock: Callable[[], float],
        lend_pages: int = 0,
        loan_s: float = LOAN_S,
    ) -> None:
        """Manage `pages` pages of `page_size` tokens each; page 0 is the scratch page.

        `slots` are the control slots of leases and loans. `endpoint` and `shards` go into their
        addresses. `clock` returns monotonic seconds. At most `lend_pages` are lent at a time, each
        for `loan_s` seconds.
        """
        self.pages = PageManager(pages, page_size)
        self.sequences = SequenceTable(self.pages, page_size)
        self.receiver = LeaseReceiver(
            self.pages, self.sequences, slots, endpoint, shards, identity, clock
        )
        self.landings = Landings(self.receiver)
        # Pages that are not lent, for a block of this cache that comes home: where all engines of a
        # cycle of debts are full, one such block lets them repay each other.
        self.spare = 0
        self.lender = self.sequences.loans = Lender(
            self.pages,
            epoch=identity.epoch,
            most=lend_pages,
            lease_s=loan_s,
            growth=lambda: len(self.sequences) + self.pages.reserved + self.spare,
            clock=clock,
            slots=self.receiver.leases.slots,
        )

    def lend(
        self, debtor: EngineId, epoch: int, lease_id: LeaseId, size: int, *, at: int
    ) -> str | Literal[False]:
        """Lend `size` pages; return the loan's address, or False if there is no room.

        Raises as `Lender.allocate`.
        """
        if self.lender.allocate(debtor, epoch, lease_id, size, at=at) is False:
            return False
        loan = self.lender.loan(debtor, lease_id)
        if loan is None:
            raise Internal("a loan that was made is missing")
        return self._address(loan)

    def take_back(
        self,
        debtor: EngineId,
        epoch: int,
        lease_id: LeaseId,
        pages: Iterable[PageId] | None = None,
        *,
        at: int,
    ) -> tuple[int, str | None]:
        """Take back `pages` of a loan, or all of it.

        Return how many pages this ended, and the address of what is left. Raises as `Lender.free`.
        """
        freed = self.lender.free(debtor, epoch, lease_id, pages, at=at)
        rest = self.lender.loan(debtor, lease_id)
        return freed, self._address(rest) if rest is not None else None

    @property
    def page_use(self) -> PageUse:
        """Pages by owner."""
        pages, leases = self.pages, self.receiver.leases
        free, cached = pages.pool.free, pages.prefix.cached
        leased, quarantined = leases.leased, leases.quarantined
        lent = self.lender.lent
        active = pages.total - free - cached - leased - quarantined - lent
        return PageUse(
            total=pages.total,
            free=free,
            cached=cached,
            leased=leased,
            active=active,
            quarantined=quarantined,
            lent=lent,
            pinned=pages.policy.pinned,
        )

    def check(self, holders: Iterable[Sequence[PageId]] = ()) -> None:
        """Check that every page is free, or held as sequences, leases, loans and `holders` say.

        Raises `Internal` if one is not.
        """
        self.lender.check()
        accounts = self.sequences, self.receiver, self.landings, self.lender
        self.pages.check([*(pages for one in accounts for pages in one.holders()), *holders])

    def _address(self, loan: Loan) -> str:
        """Return the signed address of a loan.

        Its positions count from 0 in the loan's own pages, and its digest is that of no tokens, so
        a mirror of any sequence can write up to `room`. Its lease id is that of no receive lease.
        """
        return self.receiver.address(
            LeaseId(f"loan {loan.lease_id} of {loan.debtor}"),
            loan.slot,
            loan.nonce,
            loan.pages,
            room=len(loan.pages) * self.sequences.page_size,
        )
