"""What a creditor answers to the calls of its debtors, and its row of the ledger."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import count
from typing import Any

from engine.protocol import (
    BadRequest,
    Draining,
    Heartbeat,
    LendAllocate,
    LendAllocateReply,
    LendFree,
    LendFreeReply,
    LendRenew,
    LendRenewReply,
    LendSend,
)
from kvcache.bookkeeping import Bookkeeping
from kvcache.lease import Identity
from kvcache.types import EngineId, LeaseId, PageId

__all__ = ["LentPages"]


class LentPages:
    """The pages of one cache that other engines borrow (Infinite-LLM, sections 4.3 and 4.4).

    Debtors call; this engine calls none of them. So a debtor learns from the answer to its next
    renewal that a loan is called back. Calls raise the errors of `kvcache.lending.Lender`.
    """

    def __init__(
        self,
        bookkeeping: Bookkeeping,
        lock: AbstractContextManager[Any],
        identity: Identity,
        draining: Callable[[], bool],
        endpoints: Sequence[str],
        borrowed: Callable[[], Mapping[EngineId, int]] | None,
    ) -> None:
        """`lock` is that of the cache, and `identity` this engine's.

        `draining` says whether the engine ends, so that it lends nothing further. `endpoints`
        answer queries over lent pages. `borrowed` returns the pages that this engine has borrowed
        itself, by creditor; None: it does not borrow.
        """
        self._bookkeeping, self._lock, self._identity = bookkeeping, lock, identity
        self._draining, self._endpoints, self._borrowed = draining, endpoints, borrowed
        self._sequence = count(1)  # of heartbeats

    def allocate(self, call: LendAllocate) -> LendAllocateReply:
        """Lend pages, or refuse for lack of room. Raises `Draining` too."""
        if self._draining():
            raise Draining("this engine is draining")
        if call.debtor == self._identity.engine_id:
            raise BadRequest("an engine borrows nothing from itself", param="debtor")
        with self._lock:
            address = self._bookkeeping.lend(
                EngineId(call.debtor),
                call.epoch,
                LeaseId(call.lease_id),
                call.size,
                at=call.creditor_epoch,
            )
        return LendAllocateReply(
            granted=address is not False,
            kv_addr=address or None,
            lease_ms=self._lease_ms,
            endpoints=list(self._endpoints) if address else [],
        )

    def free(self, call: LendFree) -> LendFreeReply:
        """End a loan, or that of some of its pages, at its debtor's wish. Idempotent."""
        pages = None if call.pages is None else [PageId(page) for page in call.pages]
        with self._lock:
            freed, address = self._bookkeeping.take_back(
                EngineId(call.debtor),
                call.epoch,
                LeaseId(call.lease_id),
                pages,
                at=call.creditor_epoch,
            )
        return LendFreeReply(freed_pages=freed, kv_addr=address)

    def renew(self, call: LendRenew) -> LendRenewReply:
        """Renew loans, and tell which are called back or have ended."""
        with self._lock:
            renewal = self._bookkeeping.lender.renew(
                EngineId(call.debtor),
                call.epoch,
                [LeaseId(each) for each in call.lease_ids],
                at=call.creditor_epoch,
            )
        return LendRenewReply(
            renewed=list(renewal.renewed),
            called_back=list(renewal.called_back),
            ended=list(renewal.ended),
            lease_ms=self._lease_ms,
        )

    def check(self, call: LendSend) -> list[PageId]:
        """Return the pages to send. Raises as `Lender.check_pages`. Used under the cache's lock."""
        pages = [PageId(page) for page in call.pages]
        self._bookkeeping.lender.check_pages(
            EngineId(call.debtor), call.epoch, LeaseId(call.lease_id), pages,
            at=call.creditor_epoch,
        )  # fmt: skip
        return pages

    def heartbeat(self) -> Heartbeat | None:
        """Return this engine's row of the ledger; None if it neither lends nor borrows."""
        identity, lender = self._identity, self._bookkeeping.lender
        if lender.most == 0 and self._borrowed is None:
            return None
        borrowed = self._borrowed() if self._borrowed is not None else {}
        with self._lock:
            available, most, lent = lender.lendable, lender.most, lender.lent_to()
        return Heartbeat(
            instance=identity.engine_id,
            epoch=identity.epoch,
            sequence=next(self._sequence),
            available=0 if self._draining() else available,
            most=0 if self._draining() else most,
            borrowed={str(creditor): pages for creditor, pages in borrowed.items()},
            lent={str(debtor): pages for debtor, pages in lent.items()},
        )

    @property
    def _lease_ms(self) -> int:
        return round(self._bookkeeping.lender.lease_s * 1000)
