"""The accounts of an engine that borrows: its debts, their blocks, and whom it may ask."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence

from engine.borrowing.known import KnownCreditors
from engine.borrowing.records import BorrowingUse, Freeing, Process
from engine.borrowing.settings import BorrowingSettings
from engine.borrowing.stock import LoanBlocks, Stock
from engine.protocol import Creditor
from kvcache.lending import BorrowedBlock, Borrower, Renewal, Renewing
from kvcache.types import EngineId, LeaseId, PageId

__all__ = ["Accounts"]


class Accounts:
    """Thread-safe. Calls nobody but the functions that it is given, and waits for nothing."""

    def __init__(
        self,
        own: EngineId,
        block_pages: int,
        connected: Callable[[], Collection[EngineId]],
        clock: Callable[[], float],
        settings: BorrowingSettings,
    ) -> None:
        """Loans are whole blocks of `block_pages` pages each.

        `connected` returns the creditors whose attention can be asked for now. `clock` returns
        monotonic seconds.
        """
        self.block_pages = block_pages
        self._clock, self._settings = clock, settings
        self._lock = threading.Lock()
        self._borrower = Borrower(clock)
        self._stock = Stock()
        self._known = KnownCreditors(own, connected, clock, settings)
        self._freeing: dict[Freeing, None] = {}  # in order
        self._wanted = 0
        self._active = clock()  # when blocks were last wanted, taken or given back
        self._news = False  # wanted blocks may have come
        self._lost = 0

    # For sequences

    def want(self, blocks: int) -> None:
        """See `BlockSource.want`."""
        with self._lock:
            self._wanted, self._active = max(blocks, 0), self._clock()
            self._news = blocks > 0

    def take(self) -> BorrowedBlock | None:
        """See `BlockSource.take`."""
        with self._lock:
            block = self._stock.take(self._known.offered())
            if block is not None:
                self._wanted, self._active = max(self._wanted - 1, 0), self._clock()
            return block

    def give_back(self, block: BorrowedBlock, *, at_once: bool = False) -> None:
        """See `BlockSource.give_back`."""
        with self._lock:
            loan = self._stock.give_back(block)
            if loan is None:
                return
            loan.closing |= at_once
            if loan.closing:
                self._end_free(loan)
                return
            self._active = self._clock()
            if self._wanted:
                self._news = True

    def loan_of(self, block: BorrowedBlock) -> tuple[str, float] | None:
        """Return the creditor's URL and the seconds until a block's loan ends; None if it has."""
        with self._lock:
            loan = self._stock.get(block.loan)
            for debt in self._borrower.debts():
                if loan is not None and debt.lease_id == block.loan:
                    return loan.url, debt.deadline - self._clock()
            return None

    # For orders

    def epochs(self, creditor: EngineId) -> set[int]:
        """Return the processes of a creditor that have lent, or that the router has named."""
        with self._lock:
            listed = {each.epoch for each in self._known.listed if each.instance == creditor}
            return listed | {loan.epoch for loan in self._stock if loan.creditor == creditor}

    def freeze(self, order: str, creditor: EngineId, seconds: float) -> None:
        """Borrow nothing from a creditor for so long, and give back its loans without KV."""
        with self._lock:
            self._known.freeze(order, creditor, seconds)
            for loan in self._stock:
                if loan.creditor == creditor and not loan.taken:
                    self._end(loan)

    def thaw(self, order: str) -> None:
        """End what `freeze` began."""
        with self._lock:
            self._known.thaw(order)

    def fail(self, creditor: EngineId) -> None:
        """Offer no block of a creditor until `trust`."""
        with self._lock:
            self._known.failed.add(creditor)

    # For the keeper

    def now(self) -> float:
        """Return the time by the clock of the accounts, in seconds."""
        return self._clock()

    def use(self) -> BorrowingUse:
        """Return what is borrowed."""
        with self._lock:
            return BorrowingUse(
                tuple(each.instance for each in self._known.listed),
                self._borrower.borrowed_from(), len(self._stock), self._stock.free(),
                self._known.refusals, self._lost,
            )  # fmt: skip

    def failed(self) -> set[EngineId]:
        """Return the creditors that have failed and are not trusted yet."""
        with self._lock:
            return set(self._known.failed)

    def trust(self, creditor: EngineId) -> None:
        """Offer the blocks of a creditor again."""
        with self._lock:
            self._known.failed.discard(creditor)
            self._news = True

    def idle(self) -> bool:
        """Whether there is nothing to do until something is wanted."""
        with self._lock:
            busy = self._wanted or len(self._stock) or self._freeing or self._known.failed
            return not busy

    def processes(self) -> dict[Process, str]:
        """Return the processes with loans, and their URLs."""
        with self._lock:
            return {Process(loan.creditor, loan.epoch): loan.url for loan in self._stock}

    def set_creditors(self, creditors: Sequence[Creditor]) -> list[Process]:
        """Replace the list; return processes with loans that a newer one has succeeded."""
        with self._lock:
            epochs = self._known.replace(creditors)
            held = {Process(loan.creditor, loan.epoch) for loan in self._stock}
            return [each for each in held if epochs.get(each.creditor, 0) > each.epoch]

    def short(self) -> int:
        """Return how many blocks are wanted that cannot be taken now."""
        with self._lock:
            return max(self._wanted - self._stock.free(self._known.offered()), 0)

    def candidates(self) -> list[Creditor]:
        """Return the creditors to be asked now, in order."""
        with self._lock:
            return self._known.candidates()

    def rest(self, creditor: EngineId, *, longer: bool = False) -> None:
        """Ask a creditor for nothing for a while; `longer`: twice as long as the last time."""
        with self._lock:
            self._known.rest(creditor, longer=longer)

    def ask(self, creditor: Creditor, blocks: int) -> LeaseId:
        """Note a request for a loan; return its id."""
        with self._lock:
            process = Process(EngineId(creditor.instance), creditor.epoch)
            return self._borrower.ask(*process, blocks * self.block_pages)

    def abandon(self, creditor: Creditor, loan: LeaseId, *, free: bool) -> None:
        """Wait for a request no longer; `free`: its pages may be lent nevertheless."""
        with self._lock:
            self._borrower.abandon(loan)
            if free:
                process = Process(EngineId(creditor.instance), creditor.epoch)
                until = self._clock() + self._settings.freeing_s
                self._freeing[Freeing(process, creditor.url, loan, until)] = None

    def granted(
        self, creditor: Creditor, loan: LeaseId, address: str, pages: list[PageId], lease_s: float
    ) -> bool:
        """Enter a loan; return whether it may be used, and free it otherwise.

        Raises `BadRequest` for pages that were not asked for.
        """
        process = Process(EngineId(creditor.instance), creditor.epoch)
        with self._lock:
            if not self._borrower.granted(loan, pages, lease_s):
                until = self._clock() + lease_s
                self._freeing[Freeing(process, creditor.url, loan, until)] = None
                return False
            self._known.lent(process.creditor)
            self._stock.add(*process, loan, creditor.url, address, pages, self.block_pages)
            self._news = True
            return True

    def renewals(self) -> list[Renewing]:
        """Return what to ask each process now."""
        with self._lock:
            return self._borrower.renewals()

    def lease_s(self, process: Process) -> float:
        """Return the shortest time of a loan of a process, in seconds; 0 without one."""
        with self._lock:
            times = [
                debt.lease_s
                for debt in self._borrower.debts()
                if (debt.creditor, debt.epoch) == process
            ]
            return min(times, default=0.0)

    def renewed(self, renewing: Renewing, answer: Renewal) -> tuple[list[LeaseId], list[LeaseId]]:
        """Enter an answer; return the loans that have ended, and those newly called back.

        Only loans with taken blocks are returned. The others are freed.
        """
        with self._lock:
            over = [debt.lease_id for debt in self._borrower.renewed(renewing, answer)]
            ended = self._drop(over)
            called_back = []
            for name in answer.called_back:
                loan = self._stock.get(name) if name in renewing.lease_ids else None
                if loan is None or loan.called_back:
                    continue
                loan.called_back = loan.closing = True
                if loan.taken:
                    called_back.append(name)
                self._end_free(loan)
            return ended, called_back

    def lost(self, process: Process, *, free: bool) -> list[LeaseId]:
        """Forget the loans of a process; return those with taken blocks.

        `free`: the process may live, so it is told.
        """
        with self._lock:
            debts = self._borrower.lost(*process)
            if free:
                for debt in debts:
                    loan = self._stock.get(debt.lease_id)
                    if loan is not None:
                        self._free(loan, debt.deadline)
            else:
                for each in [each for each in self._freeing if each.process == process]:
                    del self._freeing[each]
            return self._drop([debt.lease_id for debt in debts])

    def sweep(self) -> dict[EngineId, list[LeaseId]]:
        """Forget loans past their deadline; return those with taken blocks, by creditor."""
        found: dict[EngineId, list[LeaseId]] = {}
        with self._lock:
            for debt in self._borrower.sweep():
                if lost := self._drop([debt.lease_id]):
                    found.setdefault(debt.creditor, []).extend(lost)
        return found

    def end_surplus(self) -> None:
        """Free loans that nobody has wanted for a while."""
        settings = self._settings
        with self._lock:
            idle_s = self._clock() - self._active
            if idle_s < settings.surplus_s:
                return
            kept = self._wanted + (settings.stock if idle_s < settings.idle_s else 0)
            for loan in self._stock.surplus(self._stock.free() - kept):
                self._end(loan)

    def end_all(self) -> None:
        """Free all loans, whatever is in them."""
        with self._lock:
            self._wanted = 0
            for loan in self._stock:
                self._end(loan)

    def to_free(self) -> dict[Process, list[Freeing]]:
        """Return the loans to free now, by process; those that have ended meanwhile are left."""
        found: dict[Process, list[Freeing]] = {}
        with self._lock:
            now = self._clock()
            self._freeing = {each: None for each in self._freeing if each.until > now}
            for each in self._freeing:
                found.setdefault(each.process, []).append(each)
        return found

    def freed(self, freeing: Freeing) -> None:
        """Note that a creditor knows that a loan is over, or a part of it."""
        with self._lock:
            self._freeing.pop(freeing, None)

    def ready(self) -> bool:
        """Return whether wanted blocks have come since the last call, and can be taken."""
        with self._lock:
            if not (self._news and self._wanted and self._stock.free(self._known.offered())):
                return False
            self._news = False
            return True

    def _end_free(self, loan: LoanBlocks) -> None:
        """Give back the free blocks of a loan, with the loan if it has no others."""
        if not loan.taken:
            self._end(loan)
        elif pages := self._stock.take_free(loan):
            deadlines = {debt.lease_id: debt.deadline for debt in self._borrower.debts()}
            if loan.loan in deadlines:
                self._borrower.give_back(loan.loan, pages)
                self._free(loan, deadlines[loan.loan], pages)

    def _end(self, loan: LoanBlocks) -> None:
        """Give back a loan."""
        deadlines = {debt.lease_id: debt.deadline for debt in self._borrower.debts()}
        if loan.loan in deadlines:
            self._borrower.give_back(loan.loan)
            self._free(loan, deadlines[loan.loan])
        self._stock.remove(loan.loan)

    def _free(
        self, loan: LoanBlocks, until: float, pages: tuple[PageId, ...] | None = None
    ) -> None:
        process = Process(loan.creditor, loan.epoch)
        self._freeing[Freeing(process, loan.url, loan.loan, until, pages)] = None

    def _drop(self, loans: list[LeaseId]) -> list[LeaseId]:
        """Forget loans; return those that had taken blocks."""
        dropped = [self._stock.remove(each) for each in loans]
        self._lost += sum(loan is not None for loan in dropped)
        return [loan.loan for loan in dropped if loan is not None and loan.taken]
