"""The creditor's calls about lent pages, and the heartbeat that tells a router of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from itertools import count

from engine.protocol import (
    BadRequest,
    Draining,
    Heartbeat,
    LendAllocate,
    LendAllocateReply,
    LendFree,
    LendFreeReply,
    LendingState,
    LendRenew,
    LendRenewReply,
    LendSend,
    LendSendReply,
    NoCapacity,
    Timeout,
)
from kvcache.cache import KVCache
from kvcache.remote_attention import Creditor
from kvcache.types import EngineId, LeaseId, PageId

__all__ = ["Lending"]

MAX_SENDS = 16  # at a time


class Lending:
    """The pages of one cache that other engines borrow (Infinite-LLM, sections 4.3 and 4.4).

    Debtors call; this engine calls none of them. So a debtor learns from the answer to its next
    renewal that a loan is called back. Calls raise the errors of `kvcache.lending.Lender`.
    """

    def __init__(
        self,
        cache: KVCache,
        draining: Callable[[], bool],
        creditor: Creditor | None = None,
        borrowed: Callable[[], Mapping[EngineId, int]] | None = None,
    ) -> None:
        """`draining` says whether the engine ends, so that it lends nothing further.

        `creditor` answers queries over lent pages. `borrowed` returns the pages that this engine
        has borrowed itself, by creditor; None: it does not borrow.
        """
        self._cache = cache
        self._draining = draining
        self._creditor = creditor
        self._borrowed = borrowed
        self._sequence = count(1)  # of heartbeats
        self._sends = 0  # under way

    def allocate(self, call: LendAllocate) -> LendAllocateReply:
        """Lend pages, or refuse for lack of room. Raises `Draining` too."""
        if self._draining():
            raise Draining("this engine is draining")
        if call.debtor == self._cache.identity.engine_id:
            raise BadRequest("an engine borrows nothing from itself", param="debtor")
        bookkeeping = self._cache.bookkeeping
        with self._cache.lock:
            address = bookkeeping.lend(
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
            endpoints=list(self._creditor.endpoints) if self._creditor and address else [],
        )

    def free(self, call: LendFree) -> LendFreeReply:
        """End a loan, or that of some of its pages, at its debtor's wish. Idempotent."""
        pages = None if call.pages is None else [PageId(page) for page in call.pages]
        with self._cache.lock:
            freed, address = self._cache.bookkeeping.take_back(
                EngineId(call.debtor),
                call.epoch,
                LeaseId(call.lease_id),
                pages,
                at=call.creditor_epoch,
            )
        if freed and self._cache.elsewhere is not None:
            self._cache.elsewhere.wake()  # blocks that come home may wait for these pages
        return LendFreeReply(freed_pages=freed, kv_addr=address)

    def renew(self, call: LendRenew) -> LendRenewReply:
        """Renew loans, and tell which are called back or have ended."""
        with self._cache.lock:
            renewal = self._cache.bookkeeping.lender.renew(
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

    async def send(self, call: LendSend) -> LendSendReply:
        """Put the KV of lent pages at an address of their debtor, and wait until it has landed.

        Raises as `Lender.check_pages` and `KVCache.open_put`, `NoCapacity` if too many of these
        calls are running, and `Timeout` if it takes longer than a loan lasts.
        """
        if self._sends >= MAX_SENDS:
            raise NoCapacity(f"{self._sends} calls send lent pages")
        self._sends += 1
        try:
            return await self._send(call, [PageId(page) for page in call.pages])
        finally:
            self._sends -= 1

    async def _send(self, call: LendSend, pages: list[PageId]) -> LendSendReply:
        cache = self._cache
        with cache.lock:
            self._check_loan(call, pages)
        # Claiming the address may wait for the peer's write right, so it runs on a thread.
        put = await asyncio.to_thread(cache.page_sends.open, call.kv_addr)
        with cache.lock:
            try:
                self._check_loan(call, pages)  # it may have ended meanwhile
                sent = cache.page_sends.send(put, pages)
            except BaseException:
                put.abandon()
                raise
        try:
            await asyncio.wait_for(
                asyncio.shield(asyncio.wrap_future(sent)), cache.bookkeeping.lender.lease_s
            )
        except TimeoutError:
            raise Timeout("the debtor's pages could not be written in time") from None
        finally:
            put.abandon()  # no effect after the last write
        return LendSendReply(sent_pages=len(pages), bytes=put.bytes_sent)

    def _check_loan(self, call: LendSend, pages: list[PageId]) -> None:
        self._cache.bookkeeping.lender.check_pages(
            EngineId(call.debtor), call.epoch, LeaseId(call.lease_id), pages,
            at=call.creditor_epoch,
        )  # fmt: skip

    def heartbeat(self) -> Heartbeat | None:
        """Return this engine's row of the ledger; None if it neither lends nor borrows."""
        identity, lender = self._cache.identity, self._cache.bookkeeping.lender
        if lender.most == 0 and self._borrowed is None:
            return None
        borrowed = self._borrowed() if self._borrowed is not None else {}
        with self._cache.lock:
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

    def state(self) -> LendingState | None:
        """Return what was computed for debtors; None if this engine answers none."""
        if self._creditor is None:
            return None
        done = self._creditor.statistics()
        return LendingState(
            endpoints=list(self._creditor.endpoints),
            debtors=done.debtors,
            answers=done.answers,
            refusals=done.refusals,
            computed_ms=done.computed_s * 1000,
            waited_ms=done.waited_s * 1000,
        )

    @property
    def _lease_ms(self) -> int:
        return round(self._cache.bookkeeping.lender.lease_s * 1000)
