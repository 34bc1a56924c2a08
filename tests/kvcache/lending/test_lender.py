from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kv_helpers import Clock

from kvcache.errors import BadRequest, Internal, LeaseExpired, StaleEpoch
from kvcache.lending import Lender, Loan, Notice, Renewal, lender
from kvcache.pages import PageManager
from kvcache.types import EngineId, LeaseId, PageId, SlotIndex

PAGES, LEASE_S, EPOCH = 16, 10.0, 7
A, B = EngineId("a"), EngineId("b")
L1, L2, L3 = LeaseId("1"), LeaseId("2"), LeaseId("3")


class World:
    """A lender over a pool, and what running sequences hold and want."""

    def __init__(self, most: int = PAGES) -> None:
        self.clock = Clock()
        self.pages = PageManager(PAGES + 1, 4)
        self.growth = 0
        self.own: list[PageId] = []
        self.lender = Lender(
            self.pages,
            epoch=EPOCH,
            most=most,
            lease_s=LEASE_S,
            growth=lambda: self.growth,
            clock=self.clock,
        )

    def allocate(self, debtor: EngineId, lease_id: LeaseId, size: int, epoch: int = 1) -> object:
        return self.lender.allocate(debtor, epoch, lease_id, size, at=EPOCH)

    def free(self, debtor: EngineId, lease_id: LeaseId, pages: list[PageId] | None = None) -> int:
        return self.lender.free(debtor, 1, lease_id, pages, at=EPOCH)

    def renew(self, debtor: EngineId, *lease_ids: LeaseId) -> Renewal:
        return self.lender.renew(debtor, 1, lease_ids, at=EPOCH)

    def check(self, available: int | None = None) -> None:
        self.lender.check()
        self.pages.check([*self.lender.holders(), self.own])
        assert available is None or self.pages.available == available


@pytest.fixture
def world() -> World:
    return World()


def test_a_repeated_message_gets_the_same_pages(world: World):
    pages = world.allocate(A, L1, 3)
    assert pages == [1, 2, 3]
    assert world.allocate(A, L1, 3) == pages
    world.check(available=PAGES - 3)


def test_the_answer_is_a_copy(world: World):
    pages = world.allocate(A, L1, 3)
    assert isinstance(pages, list)
    pages.clear()
    assert world.free(A, L1) == 3
    world.check(available=PAGES)


def test_loans_of_two_debtors_may_have_the_same_id(world: World):
    assert world.allocate(A, L1, 2) == [1, 2]
    assert world.allocate(B, L1, 1) == [3]
    assert world.lender.lent_to() == {A: 2, B: 1}
    assert world.lender.lent == 3


def test_all_pages_up_to_the_cap_are_lent_and_no_more():
    world = World(most=5)
    assert world.lender.lendable == 5
    assert world.allocate(A, L1, 6) is False
    assert world.allocate(A, L2, 5) == [1, 2, 3, 4, 5]
    assert world.lender.lendable == 0
    assert world.allocate(B, L1, 1) is False
    world.check(available=PAGES - 5)


def test_a_cap_of_zero_lends_nothing():
    assert World(most=0).allocate(A, L1, 1) is False


def test_running_sequences_keep_their_pages_and_room_to_grow(world: World):
    world.own, world.growth = world.pages.take(9), 3
    assert world.lender.lendable == 4
    assert world.allocate(A, L1, 5) is False
    assert world.allocate(A, L2, 4) is not False
    world.own += world.pages.take(3)
    world.growth = 9  # more than there are
    assert world.lender.lendable == 0
    world.check(available=0)


def test_a_refused_id_stays_refused(world: World):
    """A late copy of a request must not allocate what nobody waits for."""
    world.growth = PAGES
    assert world.allocate(A, L1, 1) is False
    world.growth = 0
    assert world.allocate(A, L1, 1) is False
    assert world.allocate(A, L2, 1) == [1]


def test_a_freed_id_gets_no_pages_again(world: World):
    world.allocate(A, L1, 2)
    assert world.free(A, L1) == 2
    assert world.free(A, L1) == 0
    with pytest.raises(LeaseExpired):
        world.allocate(A, L1, 2)
    world.check(available=PAGES)


def test_an_allocation_that_arrives_after_its_free_gets_no_pages(world: World):
    assert world.free(A, L1) == 0
    with pytest.raises(LeaseExpired):
        world.allocate(A, L1, 2)
    world.check(available=PAGES)


def test_a_refusal_stays_one_when_it_is_freed(world: World):
    world.growth = PAGES
    world.allocate(A, L1, 1)
    world.free(A, L1)
    assert world.allocate(A, L1, 1) is False


def test_a_part_of_a_loan_is_freed_once(world: World):
    world.allocate(A, L1, 4)
    assert world.free(A, L1, [PageId(2), PageId(4), PageId(9)]) == 2
    assert world.free(A, L1, [PageId(2)]) == 0
    assert world.allocate(A, L1, 4) == [1, 3]  # a late copy
    world.check(available=PAGES - 2)
    assert world.free(A, L1, [PageId(1), PageId(3)]) == 2
    assert world.lender.loans() == []
    assert world.renew(A, L1).ended == (L1,)
    world.check(available=PAGES)


def test_a_loan_ends_after_its_deadline_and_not_at_it(world: World):
    world.allocate(A, L1, 2)
    world.clock.now += LEASE_S
    assert world.lender.sweep() == 0
    world.clock.now += 0.001
    assert world.lender.sweep() == 2
    with pytest.raises(LeaseExpired):
        world.allocate(A, L1, 2)
    world.check(available=PAGES)


def test_any_message_ends_what_is_late(world: World):
    world.allocate(A, L1, PAGES)
    world.clock.now += LEASE_S + 1
    assert world.allocate(B, L1, PAGES) is not False


def test_renewed_loans_live_on_and_the_others_end(world: World):
    world.allocate(A, L1, 1)
    world.allocate(A, L2, 2)
    world.allocate(B, L1, 3)
    world.clock.now += LEASE_S / 2
    assert world.renew(A, L1, L3, L1) == Renewal((L1,), (), (L3,))
    assert [loan.debtor for loan in world.lender.loans()] == [A, B, A]
    world.clock.now += LEASE_S / 2 + 1
    assert world.lender.sweep() == 5
    assert world.lender.lent_to() == {A: 1}
    world.check(available=PAGES - 1)


def test_the_latest_loans_are_called_back_and_not_renewed(world: World):
    world.allocate(A, L1, 3)
    world.allocate(B, L1, 2)
    world.allocate(A, L2, 2)
    world.clock.now += 4
    notices = world.lender.call_back(3)
    assert notices == [Notice(B, 1, L1, 2, LEASE_S - 4), Notice(A, 1, L2, 2, LEASE_S - 4)]
    assert world.lender.call_back(3) == world.lender.call_back(0) == notices
    assert world.lender.awaited == 4
    assert world.renew(A, L1, L2) == Renewal((L1,), (L2,), ())
    world.clock.now += LEASE_S - 3
    assert world.lender.sweep() == 4
    assert world.lender.awaited == 0
    assert world.lender.lent_to() == {A: 3}


def test_as_many_loans_as_needed_are_called_back(world: World):
    world.allocate(A, L1, 3)
    world.allocate(A, L2, 2)
    assert [notice.lease_id for notice in world.lender.call_back(2)] == [L2]
    assert [notice.lease_id for notice in world.lender.call_back(3)] == [L1, L2]
    assert len(world.lender.call_back(99)) == 2


def test_nothing_is_lent_while_pages_are_called_back(world: World):
    world.allocate(A, L1, 3)
    world.lender.call_back(1)
    assert world.lender.lendable == 0
    assert world.allocate(B, L1, 1) is False
    world.free(A, L1)
    assert world.lender.lendable == PAGES
    assert world.allocate(B, L2, 1) is not False


def test_a_late_loan_is_not_called_back_but_freed(world: World):
    world.allocate(A, L1, 3)
    world.clock.now += LEASE_S + 1
    assert world.lender.call_back(1) == []
    world.check(available=PAGES)


def test_a_new_epoch_of_a_debtor_frees_the_loans_of_the_old_one(world: World):
    world.allocate(A, L1, 3)
    world.allocate(B, L1, 2)
    assert world.allocate(A, L1, 1, epoch=2) == [1]
    assert world.lender.lent_to() == {A: 1, B: 2}
    for late in (
        lambda: world.allocate(A, L2, 1),
        lambda: world.free(A, L1),
        lambda: world.renew(A, L1),
    ):
        with pytest.raises(StaleEpoch):
            late()
    world.check(available=PAGES - 3)


@pytest.mark.parametrize("call", ["free", "renew"])
def test_every_message_tells_of_a_new_epoch(world: World, call: str):
    world.allocate(A, L1, 3)
    if call == "free":
        world.lender.free(A, 2, L2, at=EPOCH)
    else:
        assert world.lender.renew(A, 2, [L1], at=EPOCH).ended == (L1,)
    world.check(available=PAGES)


def test_ids_of_a_new_epoch_are_new(world: World):
    world.allocate(A, L1, 1)
    world.free(A, L1)
    assert world.allocate(A, L1, 1, epoch=2) == [1]


@pytest.mark.parametrize("at", [EPOCH - 1, EPOCH + 1])
def test_messages_for_another_process_of_the_creditor_change_nothing(world: World, at: int):
    world.allocate(A, L1, 3)
    for call in (
        lambda: world.lender.allocate(A, 2, L2, 1, at=at),
        lambda: world.lender.free(A, 2, L1, at=at),
        lambda: world.lender.renew(A, 2, [L1], at=at),
    ):
        with pytest.raises(StaleEpoch):
            call()
    assert world.lender.lent_to() == {A: 3}


BAD: dict[str, Callable[[World], object]] = {
    "no pages": lambda world: world.allocate(A, L2, 0, epoch=2),
    "fewer than none": lambda world: world.allocate(A, L2, -1, epoch=2),
    "another size": lambda world: world.allocate(A, L1, 4),
    "no name": lambda world: world.allocate(EngineId(""), L2, 1),
    "a long name": lambda world: world.allocate(EngineId("x" * 257), L2, 1),
    "a long id": lambda world: world.allocate(A, LeaseId("x" * 257), 1, epoch=2),
    "a long id to free": lambda world: world.free(A, LeaseId("x" * 257)),
    "no name to renew": lambda world: world.renew(EngineId(""), L1),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_messages_change_nothing(world: World, case: str):
    world.allocate(A, L1, 3)
    with pytest.raises(BadRequest):
        BAD[case](world)
    assert world.renew(A, L1).renewed == (L1,)
    world.check(available=PAGES - 3)


@pytest.mark.parametrize(("most", "lease_s"), [(-1, 1.0), (1, 0.0), (1, float("nan"))])
def test_a_lender_needs_a_cap_and_a_time(most: int, lease_s: float):
    with pytest.raises(BadRequest):
        Lender(PageManager(4, 4), epoch=1, most=most, lease_s=lease_s, growth=int, clock=Clock())


def test_long_names_and_short_times_are_taken(world: World):
    debtor, lease_id = EngineId("x" * 256), LeaseId("y" * 256)
    assert world.allocate(debtor, lease_id, 1) == [1]
    Lender(PageManager(4, 4), epoch=1, most=1, lease_s=0.1, growth=int, clock=Clock())


def test_memory_of_ended_loans_is_bounded(world: World, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lender, "REMEMBERED", 3)
    ids = [LeaseId(str(number)) for number in range(5)]
    for lease_id in ids:
        world.allocate(A, lease_id, 1)
        world.free(A, lease_id)
    for lease_id in ids[2:]:
        with pytest.raises(LeaseExpired):
            world.allocate(A, lease_id, 1)
    assert world.allocate(A, ids[1], 1) == [1]  # forgotten; it ends at its deadline
    world.check(available=PAGES - 1)


def test_memory_of_debtors_is_bounded(world: World, monkeypatch: pytest.MonkeyPatch):
    """Those without a loan that have been silent for longest are forgotten."""
    monkeypatch.setattr(lender, "REMEMBERED", 3)
    c, d, e = (EngineId(name) for name in "cde")
    world.allocate(A, L1, 1, epoch=5)
    for debtor in (B, c, B, d):
        world.free(debtor, L1) if debtor is not d else world.renew(d, L1)
    known = [debtor for debtor in (A, B, c, d) if debtor in world.lender._epochs]
    assert known == [A, B, d]
    world.allocate(B, L2, 1)
    world.allocate(d, L2, 1)
    world.allocate(e, L2, 1)  # all of them have loans
    assert set(world.lender._epochs) == {A, B, d, e}
    world.check(available=PAGES - 4)
    with pytest.raises(StaleEpoch):
        world.allocate(A, L2, 1, epoch=4)


def loan(**fields: object) -> Loan:
    values = {"number": 9, "size": 1, "pages": [PageId(9)], "deadline": 9e9} | fields
    return Loan(debtor=B, epoch=1, lease_id=L3, slot=SlotIndex(0), nonce=0, **values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (loan(pages=[PageId(1)]), "lent twice"),
        (loan(pages=[PageId(page) for page in range(4, 12)]), "at most"),
        (loan(pages=[]), "no pages"),
        (loan(), "earlier process"),
        (loan(deadline=0.0), "order"),
    ],
)
def test_check_finds_wrong_accounts(wrong: Loan, says: str):
    world = World(most=10)
    world.allocate(A, L1, 3)
    world.lender.check()
    world.lender._loans[B, L3] = wrong
    if says != "earlier process":
        world.lender._epochs[B] = 1
    with pytest.raises(Internal, match=says):
        world.lender.check()


steps = st.lists(
    st.one_of(
        st.tuples(
            st.just("allocate"),
            st.sampled_from([A, B]),
            st.sampled_from([L1, L2, L3]),
            st.integers(1, 2),
            st.integers(1, 6),
        ),
        st.tuples(
            st.just("free"),
            st.sampled_from([A, B]),
            st.sampled_from([L1, L2, L3]),
            st.integers(1, 2),
            st.none() | st.lists(st.integers(1, PAGES), max_size=4),
        ),
        st.tuples(
            st.just("renew"),
            st.sampled_from([A, B]),
            st.lists(st.sampled_from([L1, L2, L3]), max_size=3),
            st.integers(1, 2),
        ),
        st.tuples(st.just("call back"), st.integers(0, 8)),
        st.tuples(st.just("wait"), st.sampled_from([1.0, 4.0, 11.0])),
        st.tuples(st.just("own"), st.integers(1, 5)),
        st.tuples(st.just("end own"), st.integers(1, 5)),
        st.tuples(st.just("growth"), st.integers(0, 5)),
    ),
    max_size=40,
)


@given(steps, st.integers(0, PAGES))
def test_accounts_and_pool_agree_after_any_messages(history: list[tuple[object, ...]], most: int):
    world = World(most)
    for kind, *values in history:
        with suppress(LeaseExpired, StaleEpoch, BadRequest):
            step(world, str(kind), values)
        world.check()
    world.clock.now += LEASE_S + 1
    world.lender.sweep()
    world.pages.drop(world.own)
    assert world.pages.available == PAGES


def step(world: World, kind: str, values: list) -> None:
    if kind == "allocate":
        debtor, lease_id, epoch, size = values
        world.lender.sweep()
        before = world.lender.lent
        world.lender.allocate(debtor, epoch, lease_id, size, at=EPOCH)
        if world.lender.lent > before:
            assert world.pages.available >= world.growth
    elif kind == "free":
        debtor, lease_id, epoch, pages = values
        world.lender.free(debtor, epoch, lease_id, pages, at=EPOCH)
    elif kind == "renew":
        debtor, lease_ids, epoch = values
        answer = world.lender.renew(debtor, epoch, lease_ids, at=EPOCH)
        assert {*answer.renewed, *answer.called_back, *answer.ended} == set(lease_ids)
    elif kind == "call back":
        world.lender.call_back(values[0])
        assert world.lender.awaited >= min(values[0], world.lender.lent)
    elif kind == "wait":
        world.clock.now += values[0]
    elif kind == "own" and world.pages.available >= values[0]:
        world.own += world.pages.take(values[0])
    elif kind == "end own":
        world.pages.drop(world.own[: values[0]])
        del world.own[: values[0]]
    elif kind == "growth":
        world.growth = values[0]
