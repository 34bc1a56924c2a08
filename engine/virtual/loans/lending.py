"""The creditor's answers to calls about lent pages, and its row of the ledger."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import count

from engine.protocol import (
    BadRequest,
    Heartbeat,
    LendAllocate,
    LendAllocateReply,
    LendFree,
    LendFreeReply,
    LendRenew,
    LendRenewReply,
)
from kvcache.bookkeeping import Bookkeeping
from kvcache.lease import Identity
from kvcache.types import EngineId, LeaseId, PageId

__all__ = ["VirtualLending"]


class VirtualLending:
    """What `engine.service.lending.Lending` answers, which needs a cache with memory and threads.

    The accounts are the real ones (`kvcache.lending.Lender`).
    """

    def __init__(
        self,
        bookkeeping: Bookkeeping,
        identity: Identity,
        endpoint: str,
        borrowed: Callable[[], Mapping[EngineId, int]] | None,
    ) -> None:
        """`endpoint` answers queries. `borrowed` returns the pages that this engine has borrowed.

        None: it does not borrow.
        """
        self._bookkeeping = bookkeeping
        self._identity = identity
        self._endpoint = endpoint
        self._borrowed = borrowed
        self._sequence = count(1)

    def answer(
        self, call: LendAllocate | LendFree | LendRenew
    ) -> LendAllocateReply | LendFreeReply | LendRenewReply:
        """Answer a debtor's call. Raises as `Lender`."""
        if isinstance(call, LendAllocate):
            return self._allocate(call)
        if isinstance(call, LendFree):
            return self._free(call)
        renewal = self._bookkeeping.lender.renew(
            EngineId(call.debtor), call.epoch, [LeaseId(each) for each in call.lease_ids],
            at=call.creditor_epoch,
        )  # fmt: skip
        return LendRenewReply.model_construct(
            renewed=list(renewal.renewed), called_back=list(renewal.called_back),
            ended=list(renewal.ended), lease_ms=self._lease_ms,
        )  # fmt: skip

    def heartbeat(self) -> Heartbeat | None:
        """Return this engine's row of the ledger; None if it neither lends nor borrows."""
        lender = self._bookkeeping.lender
        if lender.most == 0 and self._borrowed is None:
            return None
        borrowed = self._borrowed() if self._borrowed is not None else {}
        return Heartbeat(
            instance=self._identity.engine_id,
            epoch=self._identity.epoch,
            sequence=next(self._sequence),
            available=lender.lendable,
            borrowed={str(creditor): pages for creditor, pages in borrowed.items()},
            lent={str(debtor): pages for debtor, pages in lender.lent_to().items()},
        )

    def _allocate(self, call: LendAllocate) -> LendAllocateReply:
        if call.debtor == self._identity.engine_id:
            raise BadRequest("an engine borrows nothing from itself", param="debtor")
        address = self._bookkeeping.lend(
            EngineId(call.debtor), call.epoch, LeaseId(call.lease_id), call.size,
            at=call.creditor_epoch,
        )  # fmt: skip
        return LendAllocateReply.model_construct(
            granted=address is not False, kv_addr=address or None, lease_ms=self._lease_ms,
            endpoints=[self._endpoint] if address else [],
        )  # fmt: skip

    def _free(self, call: LendFree) -> LendFreeReply:
        pages = None if call.pages is None else [PageId(page) for page in call.pages]
        freed, address = self._bookkeeping.take_back(
            EngineId(call.debtor), call.epoch, LeaseId(call.lease_id), pages,
            at=call.creditor_epoch,
        )  # fmt: skip
        return LendFreeReply.model_construct(freed_pages=freed, kv_addr=address)

    @property
    def _lease_ms(self) -> int:
        return round(self._bookkeeping.lender.lease_s * 1000)
