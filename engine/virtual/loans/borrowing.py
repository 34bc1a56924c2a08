"""Blocks of pages that other virtual engines lend: the real keeper, on the virtual event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any

from engine.borrowing import (
    Accounts,
    BorrowingSettings,
    BorrowingUse,
    Keeper,
    Process,
    Tell,
    names_of,
)
from engine.protocol import (
    BLOCK_TOKENS,
    BadRequest,
    BorrowingState,
    LeaseExpired,
    LendCreditors,
    LendSend,
)
from engine.virtual.loans.calls import VirtualLoanCalls
from engine.virtual.loans.links import VirtualLinks
from kvcache.lease import Identity
from kvcache.lending import BorrowedBlock
from kvcache.types import EngineId, LeaseId

__all__ = ["AtOnce", "VirtualBorrowing"]


class VirtualBorrowing:
    """A `kvcache.lending.BlockSource` over the engines that the router names.

    It is what `engine.service.borrowing.Borrowing` is on a thread of its own.
    """

    def __init__(
        self,
        identity: Identity,
        calls: VirtualLoanCalls,
        links: VirtualLinks,
        before: Callable[[], object],
        *,
        page_size: int,
        settings: BorrowingSettings,
    ) -> None:
        """`before` is called before blocks come or are lost: the step under way ends before that.

        Raises `BadRequest` for a page size that does not divide a block.
        """
        if BLOCK_TOKENS % page_size:
            raise BadRequest(f"page size {page_size} does not divide {BLOCK_TOKENS}")
        # See `BlockSource`.
        self.on_ready: Callable[[], object] = lambda: None
        self.on_lost: Callable[[EngineId, Sequence[LeaseId]], object] = lambda _, __: None
        self.on_called_back: Callable[[EngineId, Sequence[LeaseId]], object] = lambda _, __: None
        loop = asyncio.get_running_loop()
        self._before, self._calls = before, calls
        self._identity, self._settings = identity, settings
        self._accounts = Accounts(
            identity.engine_id, BLOCK_TOKENS // page_size, links.connected, loop.time, settings
        )
        tell = Tell(
            ready=lambda: self._tell(lambda: self.on_ready()),
            lost=lambda *what: self._tell(lambda: self.on_lost(*what)),
            called_back=lambda *what: self._tell(lambda: self.on_called_back(*what)),
        )
        self._keeper = Keeper(self._accounts, calls, identity, links, tell, settings)
        self._task = loop.create_task(self._keeper.run())

    def want(self, blocks: int) -> None:
        """See `BlockSource.want`."""
        self._accounts.want(blocks)
        self._keeper.woken.set()

    def take(self) -> BorrowedBlock | None:
        """See `BlockSource.take`."""
        return self._accounts.take()

    def give_back(self, block: BorrowedBlock, *, at_once: bool = False) -> None:
        """See `BlockSource.give_back`."""
        self._accounts.give_back(block, at_once=at_once)
        self._keeper.woken.set()

    def send_home(
        self,
        block: BorrowedBlock,
        kv_addr: str,
        done: Callable[[BaseException | None], object],
    ) -> None:
        """See `BlockSource.send_home`."""
        found = self._accounts.loan_of(block)
        if found is None:
            done(LeaseExpired(f"loan {block.loan} of {block.creditor} is over"))
            return
        url, left_s = found
        call = LendSend(
            lease_id=block.loan, pages=list(block.pages), kv_addr=kv_addr,
            **names_of(self._identity, Process(block.creditor, block.epoch)),
        )  # fmt: skip

        def answered(failure: BaseException | None) -> None:
            self._before()
            done(failure)

        self._keeper.send_home(url, min(left_s, self._settings.send_s), call, answered)

    def failed(self, creditor: EngineId) -> None:
        """See `BlockSource.failed`."""
        self._accounts.fail(creditor)
        self._keeper.woken.set()

    def set_creditors(self, call: LendCreditors) -> int:
        """Replace the engines to ask; return how many there are."""
        loop = asyncio.get_running_loop()
        for process in self._accounts.set_creditors(call.creditors):
            loop.call_soon(partial(self._keeper.lose, process, free=False))
        self._keeper.woken.set()
        return len(call.creditors)

    def epochs(self, creditor: EngineId) -> set[int]:
        """See `HomeOrders`."""
        return self._accounts.epochs(creditor)

    def freeze(self, order: str, creditor: EngineId, seconds: float) -> None:
        """See `HomeOrders`."""
        self._accounts.freeze(order, creditor, seconds)
        self._keeper.woken.set()

    def thaw(self, order: str) -> None:
        """See `HomeOrders`."""
        self._accounts.thaw(order)
        self._keeper.woken.set()

    def use(self) -> BorrowingUse:
        """Return what is borrowed now."""
        return self._accounts.use()

    def state(self) -> BorrowingState:
        """Return what `GET /microserving/state` tells of it."""
        use = self._accounts.use()
        return BorrowingState(
            creditors=list(use.creditors), loans=use.loans, free_blocks=use.free_blocks,
            refusals=use.refusals, lost_loans=use.lost_loans,
        )  # fmt: skip

    def die(self) -> None:
        """Keep nothing further, and tell nobody: the engine has died."""
        self._calls.die()
        self._task.cancel()

    def _tell(self, tell: Callable[[], object]) -> None:
        self._before()
        tell()


class AtOnce(Executor):
    """Runs what it is given at once: nothing blocks in virtual time."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001  whoever awaits the future gets it
            done.set_exception(error)
        return done
