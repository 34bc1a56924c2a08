"""Blocks of loans: which are offered, and which loans are surplus."""

from __future__ import annotations

import random

from engine.borrowing.stock import Stock
from kvcache.types import EngineId, LeaseId, PageId

A, B = EngineId("a"), EngineId("b")
BLOCK = 4  # pages


def stock_of(*loans: tuple[EngineId, int]) -> Stock:
    """A stock of loans of so many blocks each, named by their place."""
    stock, page = Stock(), 1
    for place, (creditor, blocks) in enumerate(loans):
        pages = [PageId(page + i) for i in range(blocks * BLOCK)]
        page += len(pages)
        stock.add(creditor, 1, LeaseId(str(place)), "http://x", f"address {place}", pages, BLOCK)
    return stock


def test_blocks_are_distinct_and_name_their_place_in_the_loan():
    stock = stock_of((A, 2), (A, 1))
    taken = [stock.take({A}) for _ in range(4)]
    assert taken[3] is None
    found = [(block.loan, block.first, block.pages) for block in taken if block is not None]
    assert found == [("0", 0, (1, 2, 3, 4)), ("0", 4, (5, 6, 7, 8)), ("1", 0, (9, 10, 11, 12))]


def test_only_blocks_of_askable_creditors_and_open_loans_are_offered():
    stock = stock_of((A, 1), (B, 1), (B, 1))
    assert stock.free() == 3 and stock.free({B}) == 2 and stock.take(set()) is None
    loan = stock.get(LeaseId("1"))
    assert loan is not None
    loan.closing = True
    assert stock.free({B}) == 1
    block = stock.take({B})
    assert block is not None and block.loan == "2" and stock.take({B}) is None


def test_loans_in_use_are_filled_first():
    stock = stock_of((A, 1), (A, 2))
    first = stock.take({A})
    second = stock.take({A})
    assert first is not None and second is not None
    stock.give_back(first)
    block = stock.take({A})
    assert (first.loan, second.loan) == ("0", "1")
    assert block is not None and block.loan == "1"


def test_what_comes_back_twice_or_too_late_changes_nothing():
    stock = stock_of((A, 2))
    block = stock.take({A})
    assert block is not None
    assert stock.give_back(block._replace(pages=(PageId(99),) * BLOCK)) is None
    assert stock.give_back(block) is not None and stock.give_back(block) is None
    assert stock.free() == 2
    other = stock.take({A})
    stock.remove(LeaseId("0"))
    assert other is not None and stock.give_back(other) is None and len(stock) == 0


def test_surplus_is_whole_idle_loans_the_latest_first():
    stock = stock_of((A, 1), (A, 2), (A, 1), (A, 1))
    block = stock.take({A})
    assert block is not None and block.loan == "0"
    assert [loan.loan for loan in stock.surplus(3)] == ["3", "2"]
    assert [loan.loan for loan in stock.surplus(4)] == ["3", "2", "1"]
    assert stock.surplus(0) == stock.surplus(-1) == []


def test_no_block_is_ever_given_out_twice():
    chosen = random.Random(7)
    stock, held = stock_of((A, 3), (B, 2), (A, 1)), []
    for _ in range(500):
        if held and chosen.random() < 0.5:
            assert stock.give_back(held.pop(chosen.randrange(len(held)))) is not None
        elif (block := stock.take({A, B})) is not None:
            held.append(block)
        pages = [page for block in held for page in block.pages]
        assert len(set(pages)) == len(pages)
        assert stock.free() + len(held) == 6
