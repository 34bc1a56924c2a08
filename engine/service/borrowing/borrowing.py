"""Blocks of pages that other engines lend: the debtor's side of Infinite-LLM, section 4.4."""

from __future__ import annotations

import asyncio
import logging
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

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
    PeerUnreachable,
)
from engine.service.borrowing.calls import CreditorCalls
from engine.service.borrowing.links import ThreadedLinks
from kvcache.lease import Identity
from kvcache.lending import BorrowedBlock
from kvcache.remote_attention import RemoteAttention
from kvcache.types import EngineId, LeaseId

__all__ = ["Borrowing", "BorrowingUse"]

log = logging.getLogger(__name__)

CLOSE_S = 3.0


class Borrowing:
    """A `kvcache.lending.BlockSource` over the engines that the router names.

    A thread of its own asks them for loans, renews these, and gives back what is free. No method
    waits for a creditor, but for `close`. The callbacks run on that thread.
    """

    def __init__(
        self,
        identity: Identity,
        remote: RemoteAttention,
        *,
        page_size: int,
        api_key: str = "",
        tls: ssl.SSLContext | None = None,
        settings: BorrowingSettings | None = None,
    ) -> None:
        """Start the thread.

        `identity` is this engine's. `remote` ships queries to creditors; this object connects and
        closes it. `api_key` is common to all engines; `tls` verifies those with https URLs. Raises
        `BadRequest` for a page size that does not divide a block.
        """
        if BLOCK_TOKENS % page_size:
            raise BadRequest(f"page size {page_size} does not divide {BLOCK_TOKENS}")
        # See `BlockSource`.
        self.on_ready: Callable[[], object] = lambda: None
        self.on_lost: Callable[[EngineId, Sequence[LeaseId]], object] = lambda _, __: None
        self.on_called_back: Callable[[EngineId, Sequence[LeaseId]], object] = lambda _, __: None
        self._settings = settings or BorrowingSettings()
        self._identity, self._remote = identity, remote
        self._api_key, self._tls = api_key, tls
        self._accounts = Accounts(
            identity.engine_id,
            BLOCK_TOKENS // page_size,
            remote.connected,
            time.monotonic,
            self._settings,
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._keeper: Keeper | None = None
        self._task: asyncio.Task[None] | None = None
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="borrowing", daemon=True)
        self._thread.start()
        self._started.wait()

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
        found, keeper = self._accounts.loan_of(block), self._keeper
        if found is None or keeper is None:
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
        if not self._on_loop(partial(keeper.send_home, url, within_s, call, done)):
            done(PeerUnreachable("this engine ends"))

    def failed(self, creditor: EngineId) -> None:
        """See `BlockSource.failed`."""
        self._accounts.fail(creditor)
        self._wake()

    # The engine

    def set_creditors(self, call: LendCreditors) -> int:
        """Replace the engines to ask; return how many there are."""
        gone = self._accounts.set_creditors(call.creditors)
        if self._keeper is not None:
            for process in gone:
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

    def close(self) -> None:
        """Give everything back, and end the thread. Waits for some seconds at most. Idempotent."""
        if self._thread.is_alive():
            self._on_loop(self._cancel)
            self._thread.join(CLOSE_S)
        self._remote.close()

    # The thread

    def _run(self) -> None:
        with asyncio.Runner() as runner:
            try:
                runner.run(self._keep())
            except asyncio.CancelledError:
                pass
            except Exception:
                log.exception("this engine borrows no longer")
            finally:
                self._started.set()

    async def _keep(self) -> None:
        tell = Tell(
            ready=lambda: self.on_ready(),
            lost=lambda creditor, loans: self.on_lost(creditor, loans),
            called_back=lambda creditor, loans: self.on_called_back(creditor, loans),
        )
        calls = CreditorCalls(self._api_key, self._tls)
        keeper = Keeper(
            self._accounts, calls, self._identity, ThreadedLinks(self._remote), tell, self._settings
        )
        self._loop, self._keeper = asyncio.get_running_loop(), keeper
        self._task = asyncio.current_task()
        self._started.set()
        await keeper.run()

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _wake(self) -> None:
        if self._keeper is not None:
            self._on_loop(self._keeper.woken.set)

    def _on_loop(self, do: Callable[[], object]) -> bool:
        """Have the thread call `do`; return False if it has ended."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(do)
                return True
        return False
