"""Orders of the router to bring blocks home from a creditor (DGFM, Infinite-LLM, section 4.5)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any, NamedTuple, Protocol

from engine.borrowing.debtor import Debtor
from engine.protocol import (
    BadRequest,
    Draining,
    LendHome,
    LendHomeReply,
    NoCapacity,
    StaleEpoch,
    Unsupported,
)
from kvcache.bookkeeping import Bookkeeping
from kvcache.borrowing import Borrowing, HomeOrder
from kvcache.types import EngineId

__all__ = ["HomeOrders"]

MOST = 16  # under way
REMEMBERED = 256


class _Order(NamedTuple):
    call: LendHome
    task: asyncio.Task[LendHomeReply]


class DebtorCache(Protocol):
    """A cache with blocks elsewhere: `kvcache.cache.KVCache`, or a virtual one."""

    @property
    def elsewhere(self) -> Borrowing | None: ...
    @property
    def bookkeeping(self) -> Bookkeeping: ...
    @property
    def lock(self) -> AbstractContextManager[Any]: ...


class HomeOrders:
    """The orders of one engine. Lives on one event loop.

    In a cycle of debts, each engine brings blocks home from the next one, and gives their pages
    back to it at once: so it can do the same. One free block anywhere in the cycle is enough, and
    no engine waits for another with anything held. While an order is under way, the engine lends
    nothing further and borrows nothing from this creditor, so pages that come free stay in the
    cycle.
    """

    def __init__(self, cache: DebtorCache, borrowing: Debtor, draining: Callable[[], bool]) -> None:
        """`borrowing` is the source of the cache's blocks. `draining`: the engine ends."""
        self._cache, self._borrowing, self._draining = cache, borrowing, draining
        self._orders: dict[str, _Order] = {}  # by swap, the latest ones

    async def run(self, call: LendHome) -> LendHomeReply:
        """Bring blocks home, and return how many came, once all have or the time is over.

        A repeated call waits for the first one, and the order goes on if nobody waits. Raises
        `BadRequest` for another order of the same name, `StaleEpoch` if this engine knows other
        processes of the creditor only, `NoCapacity` if too many orders are under way, `Draining`,
        and `Unsupported`.
        """
        order = self._orders.get(call.swap)
        if order is None:
            order = self._orders[call.swap] = self._begin(call)
        elif order.call != call:
            raise BadRequest(f"swap {call.swap} is another order", param="swap")
        return await asyncio.shield(order.task)

    def _begin(self, call: LendHome) -> _Order:
        if self._draining():
            raise Draining("this engine is draining")
        known = self._borrowing.epochs(EngineId(call.creditor))
        if known and call.creditor_epoch not in known:
            raise StaleEpoch(f"{call.creditor} is another process now")
        ended = [name for name, order in self._orders.items() if order.task.done()]
        if len(self._orders) - len(ended) >= MOST:
            raise NoCapacity(f"{MOST} orders are under way")
        for name in ended[: max(len(self._orders) - REMEMBERED, 0)]:
            del self._orders[name]
        return _Order(call, asyncio.get_running_loop().create_task(self._do(call)))

    async def _do(self, call: LendHome) -> LendHomeReply:
        cache, elsewhere, creditor = self._cache, self._cache.elsewhere, EngineId(call.creditor)
        if elsewhere is None:
            raise Unsupported("this engine does not borrow")
        loop, done, freeze_s = asyncio.get_running_loop(), asyncio.Event(), call.freeze_ms / 1000

        def tell() -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(done.set)

        order = HomeOrder(creditor, call.creditor_epoch, call.blocks, tell)
        self._borrowing.freeze(call.swap, creditor, freeze_s)
        try:
            with cache.lock:
                cache.bookkeeping.lender.freeze(call.swap, freeze_s)
            elsewhere.order_home(order)
            with suppress(TimeoutError):
                async with asyncio.timeout(freeze_s):
                    await done.wait()
        finally:
            elsewhere.cancel_order(order)
            with cache.lock:
                cache.bookkeeping.lender.thaw(call.swap)
            self._borrowing.thaw(call.swap)
        return LendHomeReply(blocks=order.home)
