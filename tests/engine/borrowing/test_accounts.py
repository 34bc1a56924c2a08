"""Blocks that go back at once, and creditors from which nothing is borrowed for a while."""

from __future__ import annotations

import pytest

from engine.borrowing.accounts import Accounts
from engine.borrowing.records import Process
from engine.borrowing.settings import BorrowingSettings
from engine.protocol import Creditor
from kvcache.lending import BorrowedBlock, Renewal
from kvcache.types import EngineId, LeaseId, PageId

A, B = EngineId("a"), EngineId("b")
BLOCK = 4  # pages
CREDITORS = [Creditor(instance=name, epoch=3, url="http://x", available=99) for name in (A, B)]


class Debtor:
    def __init__(self) -> None:
        self.now = 50.0
        self.accounts = Accounts(
            EngineId("d"), BLOCK, lambda: {A, B}, lambda: self.now, BorrowingSettings()
        )
        self.accounts.set_creditors(CREDITORS)
        self.page = 1

    def borrow(self, creditor: Creditor, blocks: int) -> LeaseId:
        loan = self.accounts.ask(creditor, blocks)
        pages = [PageId(self.page + i) for i in range(blocks * BLOCK)]
        self.page += len(pages)
        assert self.accounts.granted(creditor, loan, "address", pages, 30.0)
        return loan

    def take(self) -> BorrowedBlock:
        block = self.accounts.take()
        assert block is not None
        return block

    def freeing(self) -> list[tuple[LeaseId, tuple[PageId, ...] | None]]:
        return [
            (each.loan, each.pages) for some in self.accounts.to_free().values() for each in some
        ]


@pytest.fixture
def debtor() -> Debtor:
    return Debtor()


def test_a_block_goes_back_at_once_and_with_it_the_free_ones_of_its_loan(debtor: Debtor):
    loan = debtor.borrow(CREDITORS[0], 3)
    one, two = debtor.take(), debtor.take()
    free = tuple(PageId(page) for page in range(2 * BLOCK + 1, 3 * BLOCK + 1))
    debtor.accounts.give_back(one, at_once=True)
    ((name, pages),) = debtor.freeing()
    assert name == loan and pages is not None and set(pages) == {*free, *one.pages}
    assert debtor.accounts.use().pages == {A: BLOCK}
    assert debtor.accounts.take() is None
    debtor.accounts.give_back(one, at_once=True)  # once more changes nothing
    (freeing,) = debtor.accounts.to_free()[Process(A, 3)]
    debtor.accounts.freed(freeing)
    assert debtor.freeing() == []
    assert debtor.accounts.loan_of(two) == ("http://x", 30.0)
    debtor.accounts.give_back(two)
    assert debtor.freeing() == [(loan, None)]  # the rest of it, whatever the creditor knows
    assert debtor.accounts.use().loans == 0 and debtor.accounts.loan_of(two) is None


def test_a_loan_of_which_a_block_went_back_can_be_called_back(debtor: Debtor):
    loan = debtor.borrow(CREDITORS[0], 2)
    one, two = debtor.take(), debtor.take()
    debtor.accounts.give_back(one, at_once=True)
    (renewing,) = debtor.accounts.renewals()
    assert debtor.accounts.renewed(renewing, Renewal((), (loan,), ())) == ([], [loan])
    assert debtor.accounts.renewed(renewing, Renewal((), (loan,), ())) == ([], [])
    debtor.accounts.give_back(two)
    assert debtor.freeing()[-1] == (loan, None)


def test_the_blocks_of_a_loan_that_is_called_back_go_back_singly(debtor: Debtor):
    loan = debtor.borrow(CREDITORS[0], 3)
    one, two = debtor.take(), debtor.take()
    (renewing,) = debtor.accounts.renewals()
    assert debtor.accounts.renewed(renewing, Renewal((), (loan,), ())) == ([], [loan])
    debtor.accounts.give_back(one)
    pages = [page for _, some in debtor.freeing() for page in some or ()]
    assert len(pages) == 2 * BLOCK and not set(pages) & set(two.pages)


def test_nothing_is_borrowed_from_a_frozen_creditor(debtor: Debtor):
    idle = debtor.borrow(CREDITORS[0], 1)
    debtor.borrow(CREDITORS[0], 2)
    debtor.borrow(CREDITORS[1], 1)
    first = debtor.take()
    assert first.loan == idle
    debtor.accounts.give_back(first)
    assert debtor.take().loan == idle
    debtor.accounts.freeze("swap", A, 5.0)
    debtor.accounts.freeze("other", A, 9.0)
    assert [each.instance for each in debtor.accounts.candidates()] == [B]
    assert debtor.accounts.use().pages == {A: BLOCK, B: BLOCK}  # the loan without KV has gone
    assert debtor.take().creditor == B and debtor.accounts.take() is None
    debtor.accounts.thaw("swap")
    assert [each.instance for each in debtor.accounts.candidates()] == [B]
    debtor.now += 10.0
    assert [each.instance for each in debtor.accounts.candidates()] == [A, B]
    assert debtor.accounts.epochs(A) == {3} and debtor.accounts.epochs(EngineId("c")) == set()
