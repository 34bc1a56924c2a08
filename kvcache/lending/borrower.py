"""The debtor's side of borrowed memory (Infinite-LLM, section 4.4).

The debtor asks one creditor after the other. It believes in a loan for a shorter time than the
creditor keeps it: its deadline counts from when it sent the request, the creditor's from when it
got the request. So the debtor stops to use a page before another may get it, however late messages
are, as long as both clocks run equally fast.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from kvcache.errors import BadRequest, UnknownLease
from kvcache.lending.loan import Renewal
from kvcache.types import EngineId, LeaseId, PageId

__all__ = ["Borrower", "Debt", "Renewing"]


@dataclass(slots=True)
class Debt:
    """Pages of one process of a creditor, as the debtor knows them."""

    lease_id: LeaseId
    creditor: EngineId
    epoch: int  # of the creditor
    size: int  # pages asked for
    asked: float  # when, on the debtor's clock, seconds
    pages: list[PageId]  # none before the creditor has granted them
    lease_s: float = 0.0  # the creditor's, once granted
    deadline: float = 0.0  # on the debtor's clock, seconds, once granted
    called_back: bool = False


@dataclass(frozen=True, slots=True)
class Renewing:
    """A renewal under way: what to ask one process of a creditor."""

    creditor: EngineId
    epoch: int
    lease_ids: tuple[LeaseId, ...]
    sent: float


class Borrower:
    """The debts of one process. Not thread-safe: the caller's lock guards it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` returns monotonic seconds."""
        self._clock = clock
        self._count = 0
        self._asked: dict[LeaseId, Debt] = {}
        self._debts: dict[LeaseId, Debt] = {}

    def ask(self, creditor: EngineId, epoch: int, size: int) -> LeaseId:
        """Note a request for `size` pages from a process of `creditor`; return the loan's new id.

        The request may be sent several times under this id. Raises `BadRequest` for a size below 1.
        """
        if size < 1:
            raise BadRequest("a loan has at least one page", param="size")
        self._count += 1
        lease_id = LeaseId(str(self._count))
        self._asked[lease_id] = Debt(lease_id, creditor, epoch, size, self._clock(), [])
        return lease_id

    def granted(self, lease_id: LeaseId, pages: Sequence[PageId], lease_s: float) -> bool:
        """Enter the pages of a request, which the creditor lends for `lease_s` seconds.

        Returns False if nobody waits for them any more, or they may be another's already. The
        caller frees the loan then, unless `holds` says that it has come before. Raises `BadRequest`
        if these are not as many different pages as were asked for.
        """
        debt = self._asked.get(lease_id)
        if debt is None:
            return False
        if not len(pages) == len(set(pages)) == debt.size:
            raise BadRequest(f"{debt.size} pages were asked for", param="pages")
        del self._asked[lease_id]
        debt.pages, debt.lease_s, debt.deadline = list(pages), lease_s, debt.asked + lease_s
        if debt.deadline <= self._clock():
            return False
        self._debts[lease_id] = debt
        return True

    def abandon(self, lease_id: LeaseId) -> None:
        """Wait for this request no longer: it was refused, or the answer is overdue."""
        self._asked.pop(lease_id, None)

    def holds(self, lease_id: LeaseId) -> bool:
        """Whether the pages of this loan may be used now."""
        debt = self._debts.get(lease_id)
        return debt is not None and self._clock() < debt.deadline

    def debts(self) -> list[Debt]:
        """Return the loans whose pages may be used now."""
        return [debt for debt in self._debts.values() if self._clock() < debt.deadline]

    def borrowed_from(self) -> dict[EngineId, int]:
        """Return the pages borrowed, by creditor, for a heartbeat."""
        pages: Counter[EngineId] = Counter()
        for debt in self.debts():
            pages[debt.creditor] += len(debt.pages)
        return dict(pages)

    def renewals(self) -> list[Renewing]:
        """Return what to ask each creditor now: to keep its loans, and which it calls back."""
        wanted: dict[tuple[EngineId, int], list[LeaseId]] = {}
        for debt in self.debts():
            wanted.setdefault((debt.creditor, debt.epoch), []).append(debt.lease_id)
        now = self._clock()
        return [Renewing(*where, tuple(leases), now) for where, leases in wanted.items()]

    def renewed(self, renewing: Renewing, answer: Renewal) -> list[Debt]:
        """Enter the answer to a renewal; return the debts whose loans have ended.

        Answers may arrive out of order. Ids that were not asked about are ignored. A debt past its
        deadline stays lost, because the caller may have acted on that.
        """
        for lease_id in renewing.lease_ids:
            if (debt := self._debts.get(lease_id)) is None or not self.holds(lease_id):
                continue
            if lease_id in answer.renewed:
                debt.deadline = max(debt.deadline, renewing.sent + debt.lease_s)
            elif lease_id in answer.called_back:
                debt.called_back = True
        return self._lose([each for each in renewing.lease_ids if each in answer.ended])

    def called_back(self, lease_id: LeaseId) -> None:
        """Enter a creditor's notice; one for an unknown loan is ignored."""
        if (debt := self._debts.get(lease_id)) is not None:
            debt.called_back = True

    def give_back(self, lease_id: LeaseId, pages: Collection[PageId] | None = None) -> list[PageId]:
        """Stop to use `pages` of a loan, or all of it; return what the caller now frees.

        Raises `UnknownLease` if there is no such loan, and `BadRequest` for pages that it does not
        have. An error changes nothing.
        """
        if (debt := self._debts.get(lease_id)) is None:
            raise UnknownLease(f"there is no loan {lease_id}", param="lease_id")
        gone = set(debt.pages if pages is None else pages)
        if not gone <= set(debt.pages):
            raise BadRequest(f"loan {lease_id} does not have these pages", param="pages")
        debt.pages = [page for page in debt.pages if page not in gone]
        if not debt.pages:
            del self._debts[lease_id]
        return sorted(gone)

    def lost(self, creditor: EngineId, epoch: int) -> list[Debt]:
        """Return and forget the debts to a creditor's process that has ended."""
        for asked in list(self._asked.values()):
            if (asked.creditor, asked.epoch) == (creditor, epoch):
                del self._asked[asked.lease_id]
        return self._lose(
            debt.lease_id
            for debt in list(self._debts.values())
            if (debt.creditor, debt.epoch) == (creditor, epoch)
        )

    def sweep(self) -> list[Debt]:
        """Return and forget the debts past their deadline: their pages may be another's."""
        now = self._clock()
        return self._lose(
            debt.lease_id for debt in list(self._debts.values()) if debt.deadline <= now
        )

    def _lose(self, lease_ids: Iterable[LeaseId]) -> list[Debt]:
        return [self._debts.pop(each) for each in lease_ids if each in self._debts]
