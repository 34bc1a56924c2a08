"""DGFM (Infinite-LLM, section 4.5) against a search of all cycles, and over pools without room."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.protocol import BadRequest
from kvcache.lending import Lender
from kvcache.pages import PageManager
from kvcache.types import EngineId, LeaseId, PageId
from router.ledger import Swap, net_positions, plan_swaps, remote_pages, settle

Debts = dict[tuple[str, str], int]

# Inst-0 lends to 1 and 3, Inst-3 lends to 1 and borrows from 0: no cycle, whatever the numbers.
FIGURE_4: Debts = {("1", "0"): 12, ("3", "0"): 7, ("1", "3"): 9}


def cycles(debts: Debts, least: int) -> list[tuple[str, ...]]:
    """Return the simple cycles of debts of `least` pages or more, each from its first instance."""
    edges = {edge for edge, pages in debts.items() if pages >= least}
    names = sorted({name for edge in edges for name in edge})
    return [
        path
        for length in range(2, len(names) + 1)
        for path in permutations(names, length)
        if path[0] == min(path)
        and all(edge in edges for edge in zip(path, (*path[1:], path[0]), strict=True))
    ]


def debts_among(names: str, most: int) -> st.SearchStrategy[Debts]:
    edges = [(one, other) for one in names for other in names if one != other]
    return st.dictionaries(st.sampled_from(edges), st.integers(0, most))


def after(debts: Debts, swaps: list[Swap]) -> Debts:
    for swap in swaps:
        debts = settle(debts, swap.edges, swap.amount)
    return debts


@given(debts_among("abcde", 9), st.integers(1, 5))
def test_no_cycle_is_left_and_the_invariants_hold(debts: Debts, least: int):
    swaps, left = plan_swaps(debts, least), debts
    for swap in swaps:
        assert swap.amount >= least
        assert len(set(swap.cycle)) == len(swap.cycle) >= 2
        # The smallest debt of the cycle, at that time.
        assert swap.amount == min(left[edge] for edge in swap.edges)
        settled = settle(left, swap.edges, swap.amount)
        assert remote_pages(settled) == remote_pages(left) - swap.amount * len(swap.cycle)
        before, now = net_positions(left), net_positions(settled)
        assert all(now.get(name, 0) == net for name, net in before.items())
        left = settled
    assert cycles(left, least) == []
    assert bool(swaps) == bool(cycles(debts, least))
    assert len(swaps) <= len(debts)  # each ends a debt, or makes it smaller than `least`


@given(debts_among("abcdefghijklmnop", 50), st.integers(1, 20))
def test_larger_graphs_have_an_order_without_cycles_afterwards(debts: Debts, least: int):
    left = after(debts, plan_swaps(debts, least))
    edges = {edge for edge, pages in left.items() if pages >= least}
    names = {name for edge in edges for name in edge}
    while names:
        free = {name for name in names if not any((name, other) in edges for other in names)}
        assert free, "a cycle is left"
        names -= free


def test_the_debts_of_figure_4_have_no_cycle():
    assert cycles(FIGURE_4, 1) == []
    assert plan_swaps(FIGURE_4, 1) == []


def test_figure_4_and_a_debt_of_inst_0_has_one():
    swaps = plan_swaps(FIGURE_4 | {("0", "1"): 8}, 1)
    assert swaps == [Swap(("0", "1"), 8)]
    assert swaps[0].edges == [("0", "1"), ("1", "0")]


def test_a_cycle_is_swapped_by_its_smallest_debt():
    (swap,) = plan_swaps({("a", "b"): 5, ("b", "c"): 3, ("c", "a"): 4}, 2)
    assert swap == Swap(("a", "b", "c"), 3)
    assert swap.edges == [("a", "b"), ("b", "c"), ("c", "a")]


def test_small_cycles_are_left_alone():
    debts = {("a", "b"): 5, ("b", "a"): 3}
    assert plan_swaps(debts, 4) == []
    assert plan_swaps(debts, 3) == [Swap(("a", "b"), 3)]


def test_a_search_goes_on_from_where_the_path_was_cut():
    """The first cycle ends its own first debt, so the second is found from further back."""
    debts = {
        ("a", "b"): 9, ("b", "c"): 2, ("c", "a"): 9, ("b", "d"): 7, ("d", "c"): 7,
    }  # fmt: skip
    assert plan_swaps(debts, 1) == [Swap(("a", "b", "c"), 2), Swap(("a", "b", "d", "c"), 7)]


def test_a_thousand_instances_in_a_circle():
    names = [f"{number:04}" for number in range(1000)]
    debts = dict.fromkeys(zip(names, [*names[1:], names[0]], strict=True), 3)
    (swap,) = plan_swaps(debts, 1)
    assert (len(swap.cycle), swap.amount) == (1000, 3)


def test_the_positions_of_figure_4():
    assert net_positions(FIGURE_4) == {"0": 19, "1": -21, "3": 2}
    assert remote_pages(FIGURE_4) == 28


@pytest.mark.parametrize("least", [0, -1])
def test_a_threshold_is_at_least_a_page(least: int):
    with pytest.raises(BadRequest):
        plan_swaps({("a", "b"): 1}, least)


@pytest.mark.parametrize("debts", [{("a", "a"): 1}, {("a", "b"): -1}])
def test_what_is_no_debt_is_refused(debts: Debts):
    with pytest.raises(BadRequest):
        plan_swaps(debts, 1)


def test_settling_leaves_out_what_is_paid():
    debts = {("a", "b"): 5, ("b", "a"): 3, ("c", "a"): 1}
    assert settle(debts, [("a", "b"), ("b", "a")], 3) == {("a", "b"): 2, ("c", "a"): 1}
    assert debts["a", "b"] == 5


@pytest.mark.parametrize(
    ("edges", "pages"), [([("a", "b")], 6), ([("b", "a")], 1), ([("a", "b")], 0)]
)
def test_more_than_is_owed_cannot_be_settled(edges: list[tuple[str, str]], pages: int):
    with pytest.raises(BadRequest):
        settle({("a", "b"): 5}, edges, pages)


class Host:
    """An instance that has lent all of its pages but those that it uses itself."""

    def __init__(self, lent: dict[str, int], own: int) -> None:
        total = sum(lent.values()) + own
        self.pages = PageManager(total + 1, 4)
        self.own: list[PageId] = self.pages.take(own)
        self.lender = Lender(
            self.pages, epoch=1, most=total, lease_s=9.0, growth=int, clock=lambda: 0.0
        )
        self.lent = {
            debtor: self.lender.allocate(EngineId(debtor), 1, LeaseId("1"), size, at=1)
            for debtor, size in lent.items()
            if size
        }

    def check(self) -> None:
        self.lender.check()
        self.pages.check([*self.lender.holders(), self.own])


@given(debts_among("abcd", 9), st.integers(1, 3))
def test_pages_come_home_without_a_free_page(debts: Debts, least: int):
    """Each host frees what debtors bring home, and takes as much of its own into these slots."""
    hosts = {
        name: Host({debtor: n for (debtor, host), n in debts.items() if host == name}, own=2)
        for name in "abcd"
    }
    assert all(host.pages.available == 0 for host in hosts.values())
    swaps = plan_swaps(debts, least)
    for swap in swaps:
        for owner, creditor in swap.edges:
            host = hosts[creditor]
            gone = host.lent[owner][: swap.amount]
            assert len(gone) == swap.amount
            del host.lent[owner][: swap.amount]
            freed = host.lender.free(EngineId(owner), 1, LeaseId("1"), gone, at=1)
            assert freed == swap.amount
        for owner, _ in swap.edges:
            hosts[owner].own += hosts[owner].pages.take(swap.amount)
        for host in hosts.values():
            assert host.pages.available == 0
            host.check()
    left = after(debts, swaps)
    for name, host in hosts.items():
        lent = {debtor: n for (debtor, creditor), n in left.items() if creditor == name and n}
        assert host.lender.lent_to() == lent
