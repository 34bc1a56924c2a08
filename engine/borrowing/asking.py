"""How an engine asks creditors for loans, and connects to those that grant one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Protocol

from engine.borrowing.accounts import Accounts
from engine.borrowing.peers import Links, LoanCalls
from engine.borrowing.records import Process
from engine.borrowing.settings import BorrowingSettings
from engine.protocol import (
    BadRequest,
    Creditor,
    LendAllocate,
    LendAllocateReply,
    MicroserveError,
    PeerUnreachable,
)
from kvcache.errors import BadAddress
from kvcache.lease import Identity, KVAddress
from kvcache.types import EngineId, LeaseId

__all__ = ["Asking", "names_of"]

log = logging.getLogger(__name__)


class Lose(Protocol):
    """Notes that the loans of a process are over."""

    def __call__(self, process: Process, *, free: bool) -> None: ...


class Asking:
    """Asks one creditor after the other (section 4.4). Lives on one event loop."""

    def __init__(
        self,
        accounts: Accounts,
        calls: LoanCalls,
        identity: Identity,
        links: Links,
        settings: BorrowingSettings,
        *,
        lose: Lose,
        wake: Callable[[], object],
    ) -> None:
        """`wake` is called when a loan has come."""
        self._accounts, self._calls, self._settings = accounts, calls, settings
        self._identity, self._links = identity, links
        self._lose, self._wake = lose, wake
        self.linked: dict[EngineId, int] = {}  # epochs of the processes connected to

    async def borrow_all(self) -> None:
        """Ask candidates in turn until nothing is wanted, or all have refused."""
        while short := self._accounts.short():
            if not await self._borrow_some(short):
                return

    async def _borrow_some(self, short: int) -> bool:
        # Few blocks are wanted singly, so that they come back singly.
        largest = max(min(short // 4, self._settings.blocks), 1)
        for blocks in dict.fromkeys((largest, 1)):
            for creditor in self._accounts.candidates():
                if await self._borrow(creditor, blocks):
                    return True
        return False

    async def _borrow(self, creditor: Creditor, blocks: int) -> bool:
        """Ask a creditor for a loan; return whether it has come."""
        accounts, name = self._accounts, EngineId(creditor.instance)
        loan = accounts.ask(creditor, blocks)
        answered = False
        try:
            call = LendAllocate(
                lease_id=loan,
                size=blocks * accounts.block_pages,
                **names_of(self._identity, Process(name, creditor.epoch)),
            )
            reply = await self._calls.allocate(creditor.url, call, self._settings.call_s)
            if not reply.granted:
                answered = True
                if blocks == 1:
                    accounts.rest(name)
                return False
            if not self._enter(creditor, loan, call.size, reply):
                accounts.rest(name)
                return False
            answered = True
            await self._link(creditor, reply.endpoints)
        except (MicroserveError, OSError) as error:
            log.info("%s lends nothing: %s", name, error)
            accounts.rest(name, longer=True)
            return False
        finally:
            if not answered:
                accounts.abandon(creditor, loan, free=True)
        self._wake()
        return True

    def _enter(
        self, creditor: Creditor, loan: LeaseId, size: int, reply: LendAllocateReply
    ) -> bool:
        """Enter a loan. Raises `BadAddress` and `BadRequest` for one that was not asked for."""
        address = KVAddress.verify(reply.kv_addr or "", self._identity.secret)
        if (address.engine_id, address.epoch, address.fingerprint) != (
            creditor.instance,
            creditor.epoch,
            self._identity.fingerprint,
        ):
            raise BadAddress("the address of a loan is another engine's", param="kv_addr")
        if sum(count for _, count in address.runs) != size:  # a run of 2**31 pages is short
            raise BadRequest(f"{size} pages were asked for", param="kv_addr")
        return self._accounts.granted(
            creditor, loan, reply.kv_addr or "", address.pages(), reply.lease_ms / 1000
        )

    async def _link(self, creditor: Creditor, endpoints: list[str]) -> None:
        """Connect to a creditor, unless connected. Raises what `Links.connect` does.

        Its loans are given back if that fails.
        """
        process = Process(EngineId(creditor.instance), creditor.epoch)
        connected = process.creditor in self._links.connected()
        if connected and self.linked.get(process.creditor) == process.epoch:
            return
        try:
            async with asyncio.timeout(self._settings.connect_s):
                await self._links.connect(process.creditor, endpoints, process.epoch)
        except TimeoutError:
            self._lose(process, free=True)
            raise PeerUnreachable(f"{process.creditor} does not answer at its endpoints") from None
        except (MicroserveError, OSError):
            self._lose(process, free=True)
            raise
        self.linked[process.creditor] = process.epoch
        self._accounts.trust(process.creditor)


def names_of(identity: Identity, process: Process) -> dict[str, Any]:
    """Return the fields of a call that name the debtor's process and the creditor's."""
    return {
        "debtor": identity.engine_id,
        "epoch": identity.epoch,
        "creditor_epoch": process.epoch,
    }
