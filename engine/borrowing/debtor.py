"""The debtor's side of Infinite-LLM, section 4.4: blocks of pages that other engines lend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

from engine.borrowing.accounts import Accounts
from engine.borrowing.asking import names_of
from engine.borrowing.keeper import Keeper, Tell
from engine.borrowing.peers import Links, LoanCalls
from engine.borrowing.records import BorrowingUse, Process
from engine.borrowing.settings import BorrowingSettings
from engine.protocol import (
    BLOCK_TOKENS,
    BadRequest,
    BorrowingState,
    LeaseExpired,
    LendCreditors,
    LendSend,
    PeerUnreachable,
)
from kvcache.lease import Identity
from kvcache.lending import BorrowedBlock
from kvcache.types import EngineId, LeaseId

__all__ = ["Debtor"]


class Debtor(ABC):
    """A `kvcache.lending.BlockSource` over the engines that the router names.

    Its keeper runs on one event loop, which a subclass has. No method waits for a creditor. The
    callbacks run on that loop.
    """

    def __init__(
        self,
        identity: Identity,
        calls: LoanCalls,
        links: Links,
        clock: Callable[[], float],
        *,
        page_size: int,
        settings: BorrowingSettings,
    ) -> None:
        """`identity` is this engine's, and `clock` that of the loop.

        Raises `BadRequest` for a page size that does not divide a block.
        """
        if BLOCK_TOKENS % page_size:
            raise BadRequest(f"page size {page_size} does not divide {BLOCK_TOKENS}")
        # See `BlockSource`.
        self.on_ready: Callable[[], object] = lambda: None
        self.on_lost: Callable[[EngineId, Sequence[LeaseId]], object] = lambda _, __: None
        self.on_called_back: Callable[[EngineId, Sequence[LeaseId]], object] = lambda _, __: None
        self._identity, self._settings = identity, settings
        self._accounts = Accounts(
            identity.engine_id, BLOCK_TOKENS // page_size, links.connected, clock, settings
        )
        tell = Tell(
            ready=lambda: self._tell(self.on_ready),
            lost=lambda creditor, loans: self._tell(self.on_lost, creditor, loans),
            called_back=lambda creditor, loans: self._tell(self.on_called_back, creditor, loans),
        )
        self._keeper = Keeper(self._accounts, calls, identity, links, tell, settings)

    # The block source

    def want(self, blocks: int) -> None:
        """See `BlockSource.want`."""
        self._accounts.want(blocks)
        self._wake()

    def take(self) -> BorrowedBlock | None:
        """See `BlockSource.take`."""
        return self._accounts.take()

    def give_back(self, block: BorrowedBlock, *, at_once: bool = False) -> None:
        """See `BlockSource.give_back`. Blocks of loans that are over are ignored."""
        self._accounts.give_back(block, at_once=at_once)
        self._wake()

    def send_home(
        self,
        block: BorrowedBlock,
        kv_addr: str,
        done: Callable[[BaseException | None], object],
    ) -> None:
        """See `BlockSource.send_home`. It ends with the loan, or after some seconds."""
        found = self._accounts.loan_of(block)
        if found is None:
            done(LeaseExpired(f"loan {block.loan} of {block.creditor} is over"))
            return
        url, left_s = found
        call = LendSend(
            lease_id=block.loan,
            pages=list(block.pages),
            kv_addr=kv_addr,
            **names_of(self._identity, Process(block.creditor, block.epoch)),
        )
        within_s = min(left_s, self._settings.send_s)
        tell = partial(self._tell, done)
        if not self._on_loop(partial(self._keeper.send_home, url, within_s, call, tell)):
            done(PeerUnreachable("this engine ends"))

    def failed(self, creditor: EngineId) -> None:
        """See `BlockSource.failed`."""
        self._accounts.fail(creditor)
        self._wake()

    # The engine

    def set_creditors(self, call: LendCreditors) -> int:
        """Replace the engines to ask; return how many there are."""
        for process in self._accounts.set_creditors(call.creditors):
            self._on_loop(partial(self._keeper.lose, process, free=False))
        self._wake()
        return len(call.creditors)

    def epochs(self, creditor: EngineId) -> set[int]:
        """Return the processes of a creditor that have lent, or that the router has named."""
        return self._accounts.epochs(creditor)

    def freeze(self, order: str, creditor: EngineId, seconds: float) -> None:
        """Borrow nothing from a creditor for so long, or until `thaw` of the same order."""
        self._accounts.freeze(order, creditor, seconds)
        self._wake()

    def thaw(self, order: str) -> None:
        """End what `freeze` began."""
        self._accounts.thaw(order)
        self._wake()

    def use(self) -> BorrowingUse:
        """Return what is borrowed now."""
        return self._accounts.use()

    def state(self) -> BorrowingState:
        """Return what `GET /microserving/state` tells of it."""
        use = self._accounts.use()
        return BorrowingState(
            creditors=list(use.creditors),
            loans=use.loans,
            free_blocks=use.free_blocks,
            refusals=use.refusals,
            lost_loans=use.lost_loans,
        )

    # The loop

    @abstractmethod
    def _on_loop(self, do: Callable[[], object]) -> bool:
        """Have the keeper's loop call `do`, now or soon; return False if it has ended."""

    def _tell(self, tell: Callable[..., object], *what: object) -> None:
        """Tell the user of blocks something, on the keeper's loop."""
        tell(*what)

    def _wake(self) -> None:
        self._on_loop(self._keeper.woken.set)
