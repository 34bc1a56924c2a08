"""Keeps the loans of an engine: borrows, renews, connects, and gives back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from engine.borrowing.accounts import Accounts
from engine.borrowing.asking import Asking, names_of
from engine.borrowing.peers import Links, LoanCalls
from engine.borrowing.records import Freeing, Process
from engine.borrowing.settings import BorrowingSettings
from engine.protocol import (
    LendFree,
    LendRenew,
    LendSend,
    MicroserveError,
    PeerUnreachable,
    StaleEpoch,
)
from kvcache.lease import Identity
from kvcache.lending import Renewal, Renewing
from kvcache.types import EngineId, LeaseId

__all__ = ["Keeper", "Tell"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Tell:
    """What the user of blocks is told, on the keeper's thread."""

    ready: Callable[[], object]
    lost: Callable[[EngineId, list[LeaseId]], object]
    called_back: Callable[[EngineId, list[LeaseId]], object]


class Keeper:
    """Looks at the accounts every few milliseconds. Lives on one event loop.

    Each creditor has tasks of its own, so a stopped one delays no other.
    """

    def __init__(
        self,
        accounts: Accounts,
        calls: LoanCalls,
        identity: Identity,
        links: Links,
        tell: Tell,
        settings: BorrowingSettings,
    ) -> None:
        self._accounts, self._calls, self._settings = accounts, calls, settings
        self._identity, self._links, self._tell = identity, links, tell
        self._asking = Asking(
            accounts, calls, identity, links, settings, lose=self.lose, wake=self._wake
        )
        self._renewed: dict[Process, float] = {}  # when they were last asked
        self._tasks: dict[tuple[str, object], asyncio.Task[None]] = {}
        self._sending: set[asyncio.Task[None]] = set()
        self.woken = asyncio.Event()

    def _wake(self) -> None:
        self.woken.set()

    async def run(self) -> None:
        """Keep the accounts until cancelled; then give everything back."""
        try:
            while True:
                self.woken.clear()
                try:
                    self._look()
                except Exception:
                    log.exception("the accounts of borrowed pages could not be kept")
                pause = None if self._accounts.idle() else self._settings.tick_s
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self.woken.wait()
        finally:
            await self._give_all_back()

    def lose(self, process: Process, *, free: bool) -> None:
        """Note that the loans of a process are over, and tell it."""
        lost = self._accounts.lost(process, free=free)
        if self._asking.linked.get(process.creditor) == process.epoch:
            del self._asking.linked[process.creditor]
            self._links.disconnect(process.creditor)
        self._renewed.pop(process, None)
        if lost:
            log.warning("%d loans of %s are lost", len(lost), process.creditor)
            self._say(self._tell.lost, process.creditor, lost)

    def _look(self) -> None:
        accounts = self._accounts
        for creditor, loans in accounts.sweep().items():
            log.warning("%d loans of %s were not renewed in time", len(loans), creditor)
            self._say(self._tell.lost, creditor, loans)
        self._check_links()
        self._renew_all()
        accounts.end_surplus()
        for process, over in accounts.to_free().items():
            self._start("free", process, lambda loans=over: self._free(loans))  # type: ignore[misc]
        if accounts.short():
            self._start("borrow", None, self._asking.borrow_all)
        if accounts.ready():
            self._say(self._tell.ready)

    def _check_links(self) -> None:
        """Give up the loans of creditors whose exchange is lost."""
        connected = set(self._links.connected())
        for creditor, epoch in list(self._asking.linked.items()):
            if creditor not in connected:
                self.lose(Process(creditor, epoch), free=True)
                self._accounts.rest(creditor)
        held = {process.creditor for process in self._accounts.processes()}
        for creditor in self._accounts.failed():
            if creditor not in held:
                self._accounts.trust(creditor)

    # Renewals

    def _renew_all(self) -> None:
        now, failed = self._accounts.now(), self._accounts.failed()
        urls = self._accounts.processes()
        self._renewed = {each: at for each, at in self._renewed.items() if each in urls}
        for renewing in self._accounts.renewals():
            process = Process(renewing.creditor, renewing.epoch)
            last = self._renewed.setdefault(process, now)
            due = now - last >= self._interval_s(process) or process.creditor in failed
            if due and process in urls and not self._runs("renew", process):
                self._renewed[process] = now
                self._start(
                    "renew",
                    process,
                    lambda renewing=renewing, url=urls[process]: self._renew(renewing, url),  # type: ignore[misc]
                )

    def _interval_s(self, process: Process) -> float:
        """Return the time between two renewals: the shorter, the sooner a call-back is known."""
        return min(self._accounts.lease_s(process) / 4, self._settings.call_s)

    async def _renew(self, renewing: Renewing, url: str) -> None:
        process = Process(renewing.creditor, renewing.epoch)
        within_s = self._interval_s(process) or self._settings.call_s
        call = LendRenew(lease_ids=list(renewing.lease_ids), **names_of(self._identity, process))
        try:
            reply = await self._calls.renew(url, call, within_s)
        except StaleEpoch:
            self.lose(process, free=False)
        except PeerUnreachable as error:
            log.info("%s does not renew loans: %s", process.creditor, error)
            if await self._calls.refuses_connections(url, within_s):
                self.lose(process, free=False)
        except MicroserveError as error:
            log.warning("%s does not renew loans: %s", process.creditor, error)
        else:
            answer = Renewal(
                *(
                    tuple(map(LeaseId, names))
                    for names in (reply.renewed, reply.called_back, reply.ended)
                )
            )
            ended, called_back = self._accounts.renewed(renewing, answer)
            if ended:
                self._say(self._tell.lost, process.creditor, ended)
            if called_back:
                self._say(self._tell.called_back, process.creditor, called_back)
            self._accounts.trust(process.creditor)

    # Loans that are over

    async def _free(self, loans: list[Freeing]) -> None:
        for each in loans:
            process, url = each.process, each.url
            call = LendFree(
                lease_id=each.loan,
                pages=None if each.pages is None else list(each.pages),
                **names_of(self._identity, process),
            )
            try:
                await self._calls.free(url, call, self._settings.call_s)
            except PeerUnreachable:
                if await self._calls.refuses_connections(url, self._settings.call_s):
                    self._accounts.freed(each)
                    continue
                await asyncio.sleep(self._settings.rest_s)
                return
            except MicroserveError as error:
                log.debug("a loan of %s is over: %s", process.creditor, error)
            self._accounts.freed(each)

    async def _give_all_back(self) -> None:
        tasks = [*self._tasks.values(), *self._sending]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._accounts.end_all()
        freeing = [self._free(loans) for loans in self._accounts.to_free().values()]
        with suppress(TimeoutError):
            async with asyncio.timeout(self._settings.call_s):
                await asyncio.gather(*freeing, return_exceptions=True)
        await self._calls.close()

    # Blocks that come home

    def send_home(
        self, url: str, within_s: float, call: LendSend, done: Callable[[BaseException | None], Any]
    ) -> None:
        """Ask a creditor for the KV of a block; call `done` when it has answered, or will not."""
        failure: BaseException | None = PeerUnreachable("this engine ends")

        async def ask() -> None:
            nonlocal failure
            try:
                await self._calls.send(url, call, within_s)
                failure = None
            except MicroserveError as error:
                failure = error

        def ended(task: asyncio.Task[None]) -> None:
            self._sending.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                log.error("a block could not be asked for", exc_info=error)
            self._say(done, failure)

        task = asyncio.get_running_loop().create_task(ask())
        self._sending.add(task)
        task.add_done_callback(ended)

    # Tasks

    def _runs(self, what: str, whom: object) -> bool:
        return (what, whom) in self._tasks

    def _start(
        self, what: str, whom: object, work: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        """Start a task, unless one of the kind runs for the same creditor."""
        if self._runs(what, whom):
            return

        async def guarded() -> None:
            try:
                await work()
            except Exception:
                log.exception("%s failed with borrowed pages", what)
                await asyncio.sleep(self._settings.rest_s)
            finally:
                self._tasks.pop((what, whom), None)

        self._tasks[what, whom] = asyncio.get_running_loop().create_task(guarded())

    @staticmethod
    def _say(tell: Callable[..., object], *what: object) -> None:
        try:
            tell(*what)
        except Exception:
            log.exception("the user of borrowed pages failed")
