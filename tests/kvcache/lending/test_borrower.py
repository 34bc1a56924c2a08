from __future__ import annotations

import pytest
from kv_helpers import Clock

from kvcache.errors import BadRequest, UnknownLease
from kvcache.lending import Borrower, Renewal, Renewing
from kvcache.types import EngineId, LeaseId, PageId

C, D = EngineId("c"), EngineId("d")
LEASE_S = 10.0
PAGES = [PageId(1), PageId(2), PageId(3)]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def borrower(clock: Clock) -> Borrower:
    return Borrower(clock)


def borrowed(borrower: Borrower, creditor: EngineId = C, epoch: int = 1) -> LeaseId:
    lease_id = borrower.ask(creditor, epoch, len(PAGES))
    assert borrower.granted(lease_id, PAGES, LEASE_S)
    return lease_id


def test_pages_are_held_once_they_are_granted(borrower: Borrower):
    lease_id = borrower.ask(C, 1, 3)
    assert not borrower.holds(lease_id)
    assert borrower.borrowed_from() == {}
    assert borrower.granted(lease_id, PAGES, LEASE_S)
    assert borrower.holds(lease_id)
    assert borrower.borrowed_from() == {C: 3}
    (debt,) = borrower.debts()
    assert (debt.creditor, debt.epoch, debt.pages) == (C, 1, PAGES)
    assert not debt.called_back


def test_ids_are_new(borrower: Borrower):
    assert len({borrower.ask(C, 1, 1) for _ in range(5)}) == 5


def test_a_second_answer_changes_nothing(borrower: Borrower):
    lease_id = borrowed(borrower)
    assert not borrower.granted(lease_id, PAGES, LEASE_S)
    assert borrower.holds(lease_id)


def test_an_answer_to_an_abandoned_request_is_not_entered(borrower: Borrower):
    lease_id = borrower.ask(C, 1, 3)
    borrower.abandon(lease_id)
    borrower.abandon(lease_id)
    assert not borrower.granted(lease_id, PAGES, LEASE_S)
    assert not borrower.holds(lease_id)


def test_the_deadline_counts_from_the_request(borrower: Borrower, clock: Clock):
    lease_id = borrower.ask(C, 1, 3)
    clock.now += 9
    assert borrower.granted(lease_id, PAGES, LEASE_S)
    clock.now += 0.9
    assert borrower.holds(lease_id)
    assert borrower.sweep() == []
    clock.now += 0.1
    assert not borrower.holds(lease_id)
    assert borrower.debts() == []
    assert [debt.lease_id for debt in borrower.sweep()] == [lease_id]
    assert borrower.sweep() == []


def test_an_answer_after_the_deadline_is_not_entered(borrower: Borrower, clock: Clock):
    lease_id = borrower.ask(C, 1, 3)
    clock.now += LEASE_S
    assert not borrower.granted(lease_id, PAGES, LEASE_S)
    assert not borrower.holds(lease_id)


@pytest.mark.parametrize("pages", [PAGES[:2], [*PAGES, PageId(4)], [PageId(1)] * 3])
def test_an_answer_with_other_pages_than_asked_for_is_refused(
    borrower: Borrower, pages: list[PageId]
):
    lease_id = borrower.ask(C, 1, 3)
    with pytest.raises(BadRequest):
        borrower.granted(lease_id, pages, LEASE_S)
    assert borrower.granted(lease_id, PAGES, LEASE_S)


def test_a_loan_has_a_page(borrower: Borrower):
    with pytest.raises(BadRequest):
        borrower.ask(C, 1, 0)


def test_a_renewal_counts_from_when_it_was_sent(borrower: Borrower, clock: Clock):
    lease_id = borrowed(borrower)
    clock.now += 4
    (renewing,) = borrower.renewals()
    assert renewing == Renewing(C, 1, (lease_id,), clock.now)
    clock.now += 5
    (later,) = borrower.renewals()
    assert borrower.renewed(later, Renewal((lease_id,), (), ())) == []
    assert borrower.renewed(renewing, Renewal((lease_id,), (), ())) == []  # the older answer
    clock.now += 9.9
    assert borrower.holds(lease_id)
    clock.now += 0.1
    assert not borrower.holds(lease_id)


def test_each_process_of_a_creditor_is_asked_for_its_own_loans(borrower: Borrower):
    one, two, three = borrowed(borrower), borrowed(borrower, D), borrowed(borrower, C, 2)
    four = borrowed(borrower)
    asked = {(each.creditor, each.epoch): each.lease_ids for each in borrower.renewals()}
    assert asked == {(C, 1): (one, four), (D, 1): (two,), (C, 2): (three,)}
    assert borrower.borrowed_from() == {C: 9, D: 3}


def test_a_lost_debt_is_not_revived(borrower: Borrower, clock: Clock):
    lease_id = borrowed(borrower)
    clock.now += 9
    (renewing,) = borrower.renewals()
    clock.now += 1
    borrower.renewed(renewing, Renewal((lease_id,), (), ()))
    assert not borrower.holds(lease_id)


def test_an_answer_about_a_loan_given_back_meanwhile_counts_for_the_others(
    borrower: Borrower, clock: Clock
):
    one, two = borrowed(borrower), borrowed(borrower)
    clock.now += 4
    (renewing,) = borrower.renewals()
    borrower.give_back(one)
    assert borrower.renewed(renewing, Renewal((one, two), (), ())) == []
    clock.now += 9
    assert [debt.lease_id for debt in borrower.debts()] == [two]


def test_what_the_creditor_has_ended_is_lost(borrower: Borrower):
    one, two = borrowed(borrower), borrowed(borrower)
    other = borrowed(borrower, D)
    renewing = borrower.renewals()[0]
    lost = borrower.renewed(renewing, Renewal((two,), (), (one, other)))
    assert [debt.lease_id for debt in lost] == [one]
    assert borrower.holds(two) and borrower.holds(other)


def test_what_is_called_back_may_be_used_until_its_deadline(borrower: Borrower, clock: Clock):
    lease_id = borrowed(borrower)
    clock.now += 5
    (renewing,) = borrower.renewals()
    borrower.renewed(renewing, Renewal((), (lease_id,), ()))
    (debt,) = borrower.debts()
    assert debt.called_back
    clock.now += 5
    assert not borrower.holds(lease_id)


def test_a_notice_calls_back(borrower: Borrower):
    lease_id = borrowed(borrower)
    borrower.called_back(LeaseId("another"))
    borrower.called_back(lease_id)
    assert borrower.debts()[0].called_back


def test_a_loan_is_given_back_in_parts(borrower: Borrower):
    lease_id = borrowed(borrower)
    assert borrower.give_back(lease_id, [PageId(2)]) == [2]
    assert borrower.debts()[0].pages == [1, 3]
    for pages in ([PageId(2)], [PageId(1), PageId(9)]):
        with pytest.raises(BadRequest):
            borrower.give_back(lease_id, pages)
    assert borrower.give_back(lease_id) == [1, 3]
    assert not borrower.holds(lease_id)
    with pytest.raises(UnknownLease):
        borrower.give_back(lease_id)


def test_a_dead_creditor_takes_its_loans_with_it(borrower: Borrower):
    one, two, three = borrowed(borrower), borrowed(borrower, C, 2), borrowed(borrower, D)
    asked = borrower.ask(C, 1, 3)
    asked_again = borrower.ask(C, 2, 3)
    assert [debt.lease_id for debt in borrower.lost(C, 1)] == [one]
    assert borrower.holds(two) and borrower.holds(three)
    assert not borrower.granted(asked, PAGES, LEASE_S)
    assert borrower.granted(asked_again, PAGES, LEASE_S)
