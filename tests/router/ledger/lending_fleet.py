"""A fleet that lends pages over a bad network, in virtual time, and checks itself at every event.

Messages between instances and the ledger are lost, repeated, late and out of order. Instances die
and come back with a higher epoch. Each has its own clock. All is drawn from a seed.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from engine.protocol import Heartbeat, LeaseExpired, NoCapacity, StaleEpoch
from kvcache.lending import Borrower, Lender, Notice, Renewal, Renewing
from kvcache.pages import PageManager
from kvcache.types import EngineId, LeaseId, PageId
from router.ledger import Candidate, Ledger

PAGES, MOST, LEASE_S = 24, 16, 4.0  # of each instance; the cap; of a loan
RESENDS = 3


@dataclass(frozen=True)
class Conditions:
    """How bad the network and the instances are; shares are of messages."""

    lost: float
    repeated: float
    slow: float  # by up to `slow_s`
    slow_s: float
    heartbeat_s: float
    restarts_per_s: float  # of each instance

    def ended(self) -> Conditions:
        """Return the same without restarts."""
        return replace(self, restarts_per_s=0.0)


class Fleet:
    """Instances, a ledger, and the messages under way."""

    def __init__(
        self,
        names: str,
        conditions: Conditions,
        seed: int,
        *,
        lender: type[Lender] = Lender,
        borrower: type[Borrower] = Borrower,
    ) -> None:
        self.random = random.Random(seed)
        self.conditions = conditions
        self.lender, self.borrower = lender, borrower
        self.now = 0.0
        self.seen: Counter[str] = Counter()
        self.ending = False
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        host = {EngineId(name): at // 2 for at, name in enumerate(names)}
        self.ledger = Ledger(
            lambda one, other: float(host[one] != host[other]),  # type: ignore[index]
            lambda: self.now,
            fresh_s=3.0,
        )
        self.at: dict[EngineId, Instance] = {}
        for name in host:
            self.start(name, epoch=1)

    def start(self, name: EngineId, epoch: int) -> None:
        self.at[name] = Instance(self, name, epoch)

    def after(self, delay_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + delay_s, next(self._order), event))

    def send(self, arrive: Callable[[], None]) -> None:
        """Deliver a message never, once or twice, each time later."""
        conditions = self.conditions
        if self.random.random() < conditions.lost:
            self.seen["lost"] += 1
            return
        for _ in range(2 if self.random.random() < conditions.repeated else 1):
            slow = self.random.random() < conditions.slow
            self.after(self.random.uniform(0.001, conditions.slow_s if slow else 0.1), arrive)

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self._events and self._events[0][0] <= end:
            self.now, _, event = heapq.heappop(self._events)
            event()
            self.check()
        self.now = end

    def end(self) -> None:
        """Let all requests end. Nobody asks for anything new, and messages still get lost."""
        self.ending, self.conditions = True, self.conditions.ended()
        self.run(2 * LEASE_S)  # whatever is granted later is too late
        for instance in self.at.values():
            for debt in instance.borrower.debts():
                instance.give_back(debt.lease_id)
            for sequence in instance.own:
                instance.pages.drop(sequence)
            instance.own.clear()
        self.run(2.0 + self.conditions.slow_s + 2 * LEASE_S)
        for instance in self.at.values():
            instance.lender.sweep()
            instance.pages.check([])

    def check(self) -> None:
        """Check that every page has one user, as both sides see it."""
        loans = {}
        for instance in self.at.values():
            instance.lender.check()
            for loan in instance.lender.loans():
                key = (instance.name, instance.epoch, loan.debtor, loan.epoch, loan.lease_id)
                loans[key] = loan.pages
        for instance in self.at.values():
            for debt in instance.borrower.debts():
                if self.at[debt.creditor].epoch != debt.epoch:
                    continue  # the memory is gone, and nobody else has it
                key = (debt.creditor, debt.epoch, instance.name, instance.epoch, debt.lease_id)
                assert set(debt.pages) <= set(loans.get(key, ())), f"{key} is used and not lent"
        # The costly part for one of them at each event: what is wrong with a pool stays wrong.
        instance = self.random.choice(list(self.at.values()))
        instance.pages.check([*instance.lender.holders(), *instance.own])

    def all_free(self) -> bool:
        return all(each.pages.available == PAGES for each in self.at.values())


class Instance:
    """One process: its pages, sequences, loans and debts."""

    def __init__(self, fleet: Fleet, name: EngineId, epoch: int) -> None:
        self.fleet, self.name, self.epoch = fleet, name, epoch
        self.random = fleet.random
        offset = fleet.random.uniform(-1e4, 1e4)
        self.pages = PageManager(PAGES + 1, 16)
        self.own: list[list[PageId]] = []
        self.lender = fleet.lender(
            self.pages,
            epoch=epoch,
            most=MOST,
            lease_s=LEASE_S,
            growth=lambda: len(self.own),
            clock=lambda: fleet.now + offset,
        )
        self.borrower = fleet.borrower(lambda: fleet.now + offset)
        self.sequence = 0
        for event, mean_s in (
            (self.heartbeat, fleet.conditions.heartbeat_s),
            (self.renew, LEASE_S / 4),
            (self.want, 1.0),
            (self.return_some, 2.0),
            (self.compute, 0.4),
            (self.restart, 1 / max(1e-9, fleet.conditions.restarts_per_s)),
        ):
            self._again(event, mean_s)

    @property
    def alive(self) -> bool:
        return self.fleet.at[self.name] is self

    def _again(self, event: Callable[[], None], mean_s: float) -> None:
        def due() -> None:
            if self.alive:
                event()
                self._again(event, mean_s)

        if mean_s < 1e6:
            self.fleet.after(self.random.uniform(0.5, 1.5) * mean_s, due)

    def _reply(self, handle: Callable[..., None], *values: Any) -> None:
        """Send an answer to this process; a later one does not get it."""
        self.fleet.send(lambda: handle(*values) if self.alive else None)

    def restart(self) -> None:
        if self.fleet.conditions.restarts_per_s:
            self.fleet.seen["restart"] += 1
            self.fleet.start(self.name, self.epoch + 1)

    def heartbeat(self) -> None:
        self.sequence += 1
        body = Heartbeat(
            instance=self.name,
            epoch=self.epoch,
            sequence=self.sequence,
            available=self.lender.lendable,
            borrowed=dict(self.borrower.borrowed_from()),
            lent=dict(self.lender.lent_to()),
        )
        self.fleet.send(lambda: self._heard(body.model_dump_json().encode()))

    def _heard(self, body: bytes) -> None:
        try:
            new = self.fleet.ledger.receive(body)
            self.fleet.seen["heartbeat" if new else "old heartbeat"] += 1
        except StaleEpoch:
            self.fleet.seen["heartbeat of the dead"] += 1

    # Its own sequences

    def compute(self) -> None:
        """A sequence begins, grows or ends; lent pages are called back where it cannot grow."""
        draw = self.random.random()
        if draw < 0.3 and not self.fleet.ending:
            try:
                pages = self.pages.take(self.random.randint(1, 4), leaving=len(self.own) + 1)
            except NoCapacity:
                return
            self.own.append(pages)
        elif draw < 0.7 and self.own:
            try:
                self.random.choice(self.own).extend(self.pages.take(1))
            except NoCapacity:
                self.fleet.seen["call back"] += 1
                for notice in self.lender.call_back(len(self.own)):
                    self._tell(notice)
        elif self.own:
            self.pages.drop(self.own.pop(self.random.randrange(len(self.own))))

    def _tell(self, notice: Notice) -> None:
        def arrive() -> None:
            debtor = self.fleet.at[notice.debtor]
            if debtor.epoch == notice.epoch:
                debtor.borrower.called_back(notice.lease_id)

        self.fleet.send(arrive)

    # As a debtor

    def want(self) -> None:
        if not self.fleet.ending:
            self._ask(self.random.randint(1, 8), [], again=False)

    def _ask(self, size: int, refused: list[EngineId], *, again: bool) -> None:
        """Get a list of creditors, and try those that have not refused."""

        def arrive() -> None:
            found = self.fleet.ledger.creditors(self.name, size)  # type: ignore[arg-type]
            self._reply(once, found)

        def once(found: list[Candidate]) -> None:
            if not self.fleet.ending and next(answers, None) is not None:
                left = [each for each in found if EngineId(each.instance) not in refused]
                self._try(size, iter(left), refused, again=again)

        answers = iter([True])
        self.fleet.send(arrive)

    def _try(
        self, size: int, found: Iterator[Candidate], refused: list[EngineId], *, again: bool
    ) -> None:
        """Ask the candidates one after the other; then get another list, once."""
        creditor = next(found, None)
        if creditor is None:
            if refused and not again:
                self.fleet.seen["asked again"] += 1
                self._ask(size, refused, again=True)
            return
        name = EngineId(creditor.instance)
        lease_id = self.borrower.ask(name, creditor.epoch, size)
        open_ = iter([True])
        granted: list[LeaseId] = []

        def arrive() -> None:
            other = self.fleet.at[name]
            lent = other.lender.lent
            try:
                pages = other.lender.allocate(
                    self.name, self.epoch, lease_id, size, at=creditor.epoch
                )
            except LeaseExpired:
                self.fleet.seen["late allocation"] += 1
            except StaleEpoch:
                self.fleet.seen["allocation by or at the dead"] += 1
                if other.epoch != creditor.epoch:
                    self._reply(go_on)
            else:
                if other.lender.lent > lent:
                    assert other.pages.available >= len(other.own), "sequences cannot grow"
                self._reply(answered, pages)

        def answered(pages: list[PageId] | bool) -> None:
            if pages is False:
                self.fleet.seen["refused"] += 1
                go_on()
            elif self.borrower.granted(lease_id, pages, LEASE_S):  # type: ignore[arg-type]
                self.fleet.seen["granted"] += 1
                next(open_)
                granted.append(lease_id)
            elif not self.borrower.holds(lease_id):
                # Otherwise it is a copy of an answer, and the loan has ended meanwhile.
                self.fleet.seen["granted too late"] += not granted
                self._free(name, creditor.epoch, lease_id)

        def go_on() -> None:
            if next(open_, None) is not None:
                self.borrower.abandon(lease_id)
                self._free(name, creditor.epoch, lease_id)
                self._try(size, found, [*refused, name], again=again)

        for resend in range(RESENDS):
            self.fleet.after(resend * 0.5, lambda: self.fleet.send(arrive) if self.alive else None)
        self.fleet.after(RESENDS * 0.5, lambda: go_on() if self.alive else None)

    def _free(
        self, name: EngineId, epoch: int, lease_id: LeaseId, pages: list[PageId] | None = None
    ) -> None:
        def arrive() -> None:
            try:
                self.fleet.at[name].lender.free(self.name, self.epoch, lease_id, pages, at=epoch)
            except StaleEpoch:
                self.fleet.seen["free by or at the dead"] += 1

        self.fleet.send(arrive)
        self.fleet.send(arrive)

    def give_back(self, lease_id: LeaseId, part: int | None = None) -> None:
        (debt,) = (each for each in self.borrower.debts() if each.lease_id == lease_id)
        pages = self.borrower.give_back(lease_id, None if part is None else debt.pages[:part])
        self._free(debt.creditor, debt.epoch, lease_id, pages)

    def return_some(self) -> None:
        """Give back what was called back, and else some pages of some loan."""
        debts = self.borrower.debts()
        for debt in debts:
            if debt.called_back and self.random.random() < 0.7:
                self.fleet.seen["gave back what was called back"] += 1
                self.give_back(debt.lease_id)
        debts = self.borrower.debts()
        if debts and self.random.random() < 0.5:
            debt = self.random.choice(debts)
            self.give_back(debt.lease_id, self.random.choice([None, 1, len(debt.pages) // 2 or 1]))

    def renew(self) -> None:
        for lost in self.borrower.sweep():
            self.fleet.seen["lost to time"] += 1
            self._free(lost.creditor, lost.epoch, lost.lease_id)
        if self.lender.sweep():
            self.fleet.seen["expired"] += 1
        for renewing in self.borrower.renewals():
            self._renew(renewing)

    def _renew(self, renewing: Renewing) -> None:
        def arrive() -> None:
            other = self.fleet.at[renewing.creditor]
            try:
                answer = other.lender.renew(
                    self.name, self.epoch, renewing.lease_ids, at=renewing.epoch
                )
            except StaleEpoch:
                if other.epoch != renewing.epoch:
                    self._reply(gone)
            else:
                self._reply(answered, answer)

        def answered(answer: Renewal) -> None:
            self.fleet.seen["called back"] += len(answer.called_back)
            self.borrower.renewed(renewing, answer)

        def gone() -> None:
            self.fleet.seen["lost to a death"] += len(
                self.borrower.lost(renewing.creditor, renewing.epoch)
            )

        self.fleet.send(arrive)


CALM = Conditions(lost=0.0, repeated=0.0, slow=0.0, slow_s=0.0, heartbeat_s=0.3, restarts_per_s=0.0)
BAD = Conditions(
    lost=0.1, repeated=0.2, slow=0.2, slow_s=3 * LEASE_S, heartbeat_s=1.0, restarts_per_s=0.05
)
