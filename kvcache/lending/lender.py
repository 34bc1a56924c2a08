"""The creditor's side of borrowed memory (Infinite-LLM, sections 4.3 and 4.4).

    allocate ──► live ──► free by the debtor ───────────────┐
      │           │  └──► called back ──► free or deadline ─┼──► the pages are the pool's again
      └► False    └─────► deadline, or a new epoch ─────────┘   (once nobody writes into them)

The ledger may recommend a creditor by old numbers, because coherence is loose. So each creditor
decides by its own accounts alone, first come, first served. A message may arrive late, twice, out
of order, or not at all. An id that was refused or has ended gets no pages later, so a late copy of
a message allocates nothing. A loan whose debtor has fallen silent ends at its deadline.

Epochs of an instance increase: a later process has a higher one. Each message names the debtor's
epoch and the creditor's, and one that names a process of the past changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Literal

from kvcache.errors import BadRequest, Internal, LeaseExpired, NoCapacity, StaleEpoch
from kvcache.lending.loan import Loan, Notice, Renewal
from kvcache.lending.pool import LendablePages, LoanSlots, NoWriters
from kvcache.types import EngineId, LeaseId, PageId, SlotIndex

__all__ = ["Lender"]

MAX_LOANS = 512  # half of the control slots of a pool; receive leases keep the other half
REMEMBERED = 4096  # ended and refused loans, and debtors without a loan
NAME = 256  # longest name of an instance or a loan, characters


class Lender:
    """The pages that one process has lent. Not thread-safe: the caller's lock guards it.

    Loans get pages that are available and none that is in use. They leave `growth` pages available,
    so running sequences grow as before. While the creditor waits for pages that it has called back,
    it lends nothing, and neither while it is frozen.
    """

    def __init__(
        self,
        pages: LendablePages,
        *,
        epoch: int,
        most: int,
        lease_s: float,
        growth: Callable[[], int],
        clock: Callable[[], float],
        slots: LoanSlots | None = None,
    ) -> None:
        """Lend at most `most` of `pages` at a time (the paper's cap), each for `lease_s` seconds.

        `epoch` is this process's own. `growth` returns how many pages running sequences may want
        next. `clock` returns monotonic seconds. `slots` are those of the peers that write into
        `pages`; by default none does. Raises `BadRequest` for a cap below 0 or a time that is not
        above 0.
        """
        if most < 0 or not lease_s > 0:
            raise BadRequest("a lender needs a cap of 0 pages or more, and a time above 0 s")
        self.epoch = epoch
        self.most = most
        self.lease_s = lease_s
        self._pages = pages
        self._growth = growth
        self._clock = clock
        self._slots = slots or NoWriters()
        self._frozen: dict[str, float] = {}  # until when, by who asked for it
        self._made = 0
        # By deadline: all loans have the same time, and a renewed one goes to the end.
        self._loans: dict[tuple[EngineId, LeaseId], Loan] = {}
        self._epochs: dict[EngineId, int] = {}  # of debtors; the one heard of last is the last
        # Whether a loan that cannot be made any more was refused; the latest ones.
        self._ended: dict[tuple[EngineId, int, LeaseId], bool] = {}

    @property
    def lent(self) -> int:
        """Pages of all loans."""
        return sum(len(loan.pages) for loan in self._loans.values())

    @property
    def awaited(self) -> int:
        """Pages that were called back and are still lent."""
        return sum(len(loan.pages) for loan in self._loans.values() if loan.called_back)

    @property
    def frozen(self) -> bool:
        """Whether nothing is lent for a while."""
        now = self._clock()
        return any(until > now for until in self._frozen.values())

    def freeze(self, order: str, seconds: float) -> None:
        """Lend nothing further for so long, or until `thaw` of the same order."""
        self._frozen[order] = self._clock() + seconds

    def thaw(self, order: str) -> None:
        """End what `freeze` began."""
        self._frozen.pop(order, None)

    @property
    def lendable(self) -> int:
        """Pages that the next loan can have: what a heartbeat reports as available."""
        if self.awaited or self.frozen:
            return 0
        return max(0, min(self.most - self.lent, self._pages.available - self._growth()))

    def lent_to(self) -> dict[EngineId, int]:
        """Return the pages lent, by debtor, for a heartbeat."""
        pages: Counter[EngineId] = Counter()
        for loan in self._loans.values():
            pages[loan.debtor] += len(loan.pages)
        return dict(pages)

    def allocate(
        self, debtor: EngineId, epoch: int, lease_id: LeaseId, size: int, *, at: int
    ) -> list[PageId] | Literal[False]:
        """Lend `size` pages to a process of `debtor`; return them, or False if there is no room.

        A repeated message gets the same answer; `at` is the creditor's epoch that it was sent to. A
        refused debtor asks again under a new `lease_id`. Raises `BadRequest` for a size below 1, a
        bad name, or another size than before, `StaleEpoch` if either process has ended, and
        `LeaseExpired` if the loan has ended. An error changes nothing. (Section 4.3: a remote
        request without room gets false; section 4.4: first come, first served.)
        """
        self._check(debtor, lease_id, at)
        if size < 1:
            raise BadRequest("a loan has at least one page", param="size")
        self._meet(debtor, epoch)
        if (loan := self._loans.get((debtor, lease_id))) is not None:
            if loan.size != size:
                raise BadRequest(f"loan {lease_id} is of {loan.size} pages", param="size")
            return list(loan.pages)
        if (refused := self._ended.get((debtor, epoch, lease_id))) is not None:
            if refused:
                return False
            raise LeaseExpired(f"loan {lease_id} of {debtor} has ended", param="lease_id")
        try:
            pages, slot, nonce = self._take(size)
        except NoCapacity:
            self._remember(debtor, epoch, lease_id, refused=True)
            return False
        self._made += 1
        self._loans[debtor, lease_id] = Loan(
            debtor, epoch, lease_id, self._made, size, pages, self._clock() + self.lease_s,
            slot=slot, nonce=nonce,
        )  # fmt: skip
        return list(pages)

    def free(
        self,
        debtor: EngineId,
        epoch: int,
        lease_id: LeaseId,
        pages: Iterable[PageId] | None = None,
        *,
        at: int,
    ) -> int:
        """Take back `pages` of a loan, or all of it; return how many pages this freed.

        Pages that the loan does not have (any more) are ignored, so a repeated message frees
        nothing. If the loan is unknown, its allocation may still be on its way and will be refused.
        What is left of a loan has another slot, since the old address names the freed pages too.
        Raises `BadRequest` for a bad name, `StaleEpoch` if either process has ended, and
        `NoCapacity` without a slot for what is left. An error changes nothing. (Section 4.3.)
        """
        self._check(debtor, lease_id, at)
        self._meet(debtor, epoch)
        loan = self._loans.get((debtor, lease_id))
        if loan is None:
            self._remember(debtor, epoch, lease_id, refused=False)
            return 0
        wanted = set(loan.pages if pages is None else pages)
        freed = [page for page in loan.pages if page in wanted]
        if len(freed) == len(loan.pages):
            self._forget(loan)
            self._pages.drop(self._slots.close(loan.slot, freed))
        elif freed:
            slot, nonce = self._slots.open(0)
            old, loan.slot, loan.nonce = loan.slot, slot, nonce
            loan.pages = [page for page in loan.pages if page not in wanted]
            self._pages.drop(self._slots.close(old, freed))
        return len(freed)

    def renew(
        self, debtor: EngineId, epoch: int, lease_ids: Sequence[LeaseId], *, at: int
    ) -> Renewal:
        """Give these loans another `lease_s` seconds from now, but for those called back.

        The answer repeats every notice until the loan has ended, so a lost notice does not matter.
        Raises `BadRequest` for a bad name and `StaleEpoch` if either process has ended. An error
        changes nothing.
        """
        self._check(debtor, "", at)
        self._meet(debtor, epoch)
        renewed, called_back, ended = [], [], []
        for lease_id in dict.fromkeys(lease_ids):
            key = (debtor, lease_id)
            if (loan := self._loans.get(key)) is None:
                ended.append(lease_id)
            elif loan.called_back:
                called_back.append(lease_id)
            else:
                loan.deadline = self._clock() + self.lease_s
                self._loans[key] = self._loans.pop(key)
                renewed.append(lease_id)
        return Renewal(tuple(renewed), tuple(called_back), tuple(ended))

    def call_back(self, count: int) -> list[Notice]:
        """Call back loans of `count` pages or more in all; return the notices to send.

        The latest loans go first. Those called back earlier count, and their notices are repeated.
        If fewer pages are lent, all loans are called back. Nothing is taken away: a debtor that
        does not answer keeps a loan until its deadline.
        """
        self.sweep()
        short = count - self.awaited
        for loan in sorted(self._loans.values(), key=lambda each: -each.number):
            if short > 0 and not loan.called_back:
                loan.called_back = True
                short -= len(loan.pages)
        now = self._clock()
        return [
            Notice(loan.debtor, loan.epoch, loan.lease_id, len(loan.pages), loan.deadline - now)
            for loan in self._loans.values()
            if loan.called_back
        ]

    def sweep(self) -> int:
        """Free the loans past their deadline; return how many pages that were."""
        now, late = self._clock(), []
        for loan in self._loans.values():
            if now <= loan.deadline:
                break
            late.append(loan)
        return self._end(late)

    def check_pages(
        self,
        debtor: EngineId,
        epoch: int,
        lease_id: LeaseId,
        pages: Collection[PageId],
        *,
        at: int,
    ) -> None:
        """Check that the debtor's process has these pages by this loan.

        Raises `BadRequest` for a bad name or other pages, `StaleEpoch` if either process has ended,
        and `LeaseExpired` if there is no such loan.
        """
        self._check(debtor, lease_id, at)
        self._meet(debtor, epoch)
        if (loan := self._loans.get((debtor, lease_id))) is None:
            raise LeaseExpired(f"there is no loan {lease_id} of {debtor}", param="lease_id")
        if not set(pages) <= set(loan.pages):
            raise BadRequest(f"loan {lease_id} does not have these pages", param="pages")

    def loan(self, debtor: EngineId, lease_id: LeaseId) -> Loan | None:
        """Return a live loan, or None."""
        return self._loans.get((debtor, lease_id))

    def loans(self) -> list[Loan]:
        """Return the live loans, the one that ends next first."""
        return list(self._loans.values())

    def holders(self) -> Iterator[list[PageId]]:
        """Yield the pages of each loan, to prove ownership."""
        for loan in self._loans.values():
            yield loan.pages

    def check(self) -> None:
        """Check the accounts. Raises `Internal` if they are wrong."""
        lent = [page for pages in self.holders() for page in pages]
        if len(set(lent)) != len(lent):
            raise Internal("a page is lent twice")
        if len(lent) > self.most:
            raise Internal(f"{len(lent)} pages are lent, {self.most} at most may be")
        loans = self.loans()
        if any(not loan.pages for loan in loans):
            raise Internal("a loan has no pages")
        if any(self._epochs.get(loan.debtor) != loan.epoch for loan in loans):
            raise Internal("a loan is of a debtor's earlier process")
        deadlines = [loan.deadline for loan in loans]
        if deadlines != sorted(deadlines):
            raise Internal("loans are not in the order of their deadlines")

    def _check(self, debtor: EngineId, lease_id: str, at: int) -> None:
        """Raise what is wrong with a message's names, before anything changes."""
        if at != self.epoch:
            raise StaleEpoch("the message is for another process of this creditor")
        if not 0 < len(debtor) <= NAME:
            raise BadRequest(f"a name has 1 to {NAME} characters", param="debtor")
        if len(lease_id) > NAME:
            raise BadRequest(f"a loan's id has at most {NAME} characters", param="lease_id")

    def _meet(self, debtor: EngineId, epoch: int) -> None:
        """End what time and the debtor's newer process end. Raises `StaleEpoch`."""
        known = self._epochs.get(debtor, epoch)
        if epoch < known:
            raise StaleEpoch(f"{debtor} has been restarted since")
        self.sweep()
        if epoch > known:
            self._end([loan for loan in self._loans.values() if loan.debtor == debtor])
        self._epochs.pop(debtor, None)
        self._epochs[debtor] = epoch
        if (surplus := len(self._epochs) - REMEMBERED) > 0:
            kept = {debtor, *(loan.debtor for loan in self._loans.values())}
            for idle in [each for each in self._epochs if each not in kept][:surplus]:
                del self._epochs[idle]

    def _end(self, loans: Sequence[Loan]) -> int:
        for loan in loans:
            self._forget(loan)
            self._pages.drop(self._slots.close(loan.slot, loan.pages))
        return sum(len(loan.pages) for loan in loans)

    def _take(self, size: int) -> tuple[list[PageId], SlotIndex, int]:
        """Take pages and a slot for a loan. Raises `NoCapacity`, changing nothing."""
        if size > self.lendable:
            raise NoCapacity(f"{size} pages wanted, {self.lendable} may be lent")
        if len(self._loans) >= MAX_LOANS:
            raise NoCapacity(f"there are {MAX_LOANS} loans")
        pages = self._pages.take(size, leaving=self._growth())
        try:
            return pages, *self._slots.open(0)
        except NoCapacity:
            self._pages.drop(pages)
            raise

    def _forget(self, loan: Loan) -> None:
        del self._loans[loan.debtor, loan.lease_id]
        self._remember(loan.debtor, loan.epoch, loan.lease_id, refused=False)

    def _remember(self, debtor: EngineId, epoch: int, lease_id: LeaseId, *, refused: bool) -> None:
        self._ended.setdefault((debtor, epoch, lease_id), refused)
        if len(self._ended) > REMEMBERED:
            del self._ended[next(iter(self._ended))]
