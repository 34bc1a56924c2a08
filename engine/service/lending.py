"""The creditor's calls about lent pages, and the heartbeat that tells a router of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from engine.borrowing import LentPages
from engine.protocol import (
    LendFree,
    LendFreeReply,
    LendingState,
    LendSend,
    LendSendReply,
    NoCapacity,
    Timeout,
)
from kvcache.cache import KVCache
from kvcache.remote_attention import Creditor
from kvcache.types import EngineId

__all__ = ["Lending"]

MAX_SENDS = 16  # at a time


class Lending(LentPages):
    """The `LentPages` of a cache with memory: it sends them too, and tells what was computed."""

    def __init__(
        self,
        cache: KVCache,
        draining: Callable[[], bool],
        creditor: Creditor | None = None,
        borrowed: Callable[[], Mapping[EngineId, int]] | None = None,
    ) -> None:
        """`creditor` answers queries over lent pages. For the others, see `LentPages`."""
        super().__init__(
            cache.bookkeeping,
            cache.lock,
            cache.identity,
            draining,
            creditor.endpoints if creditor is not None else (),
            borrowed,
        )
        self._cache = cache
        self._creditor = creditor
        self._sends = 0  # under way

    def free(self, call: LendFree) -> LendFreeReply:
        """See `LentPages.free`."""
        reply = super().free(call)
        if reply.freed_pages and self._cache.elsewhere is not None:
            self._cache.elsewhere.wake()  # blocks that come home may wait for these pages
        return reply

    async def send(self, call: LendSend) -> LendSendReply:
        """Put the KV of lent pages at an address of their debtor, and wait until it has landed.

        Raises as `Lender.check_pages` and `KVCache.open_put`, `NoCapacity` if too many of these
        calls are running, and `Timeout` if it takes longer than a loan lasts.
        """
        if self._sends >= MAX_SENDS:
            raise NoCapacity(f"{self._sends} calls send lent pages")
        self._sends += 1
        try:
            return await self._send(call)
        finally:
            self._sends -= 1

    async def _send(self, call: LendSend) -> LendSendReply:
        cache = self._cache
        with cache.lock:
            self.check(call)
        # Claiming the address may wait for the peer's write right, so it runs on a thread.
        put = await asyncio.to_thread(cache.page_sends.open, call.kv_addr)
        with cache.lock:
            try:
                pages = self.check(call)  # it may have ended meanwhile
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
