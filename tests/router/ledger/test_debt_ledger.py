from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.protocol import BadRequest, Heartbeat, NoCapacity, StaleEpoch, TooLarge
from router.base import EngineId
from router.ledger import Candidate, Ledger

FRESH_S = 5.0
HOSTS = {"a": 1, "b": 1, "c": 2, "d": 2, "e": 3, "far": 9}


def cost(one: EngineId, other: EngineId) -> float:
    """0 on the same host, 1 elsewhere; `far` shares memory with nobody."""
    if "far" in (one, other):
        return math.inf
    return float(HOSTS.get(one, 0) != HOSTS.get(other, 0))


class World:
    def __init__(self, **options: Any) -> None:
        self.now = 100.0
        self.ledger = Ledger(cost, lambda: self.now, fresh_s=FRESH_S, **options)

    def hear(
        self, name: str, available: int = 0, *, epoch: int = 1, sequence: int = 1, **debts: Any
    ) -> bool:
        return self.ledger.record(
            Heartbeat(instance=name, epoch=epoch, sequence=sequence, available=available, **debts)
        )

    def available(self, *names: str) -> list[int]:
        return [self.ledger.available(EngineId(name)) for name in names]

    def ask(self, debtor: str, size: int) -> list[str]:
        return [each.instance for each in self.ledger.creditors(EngineId(debtor), size)]


@pytest.fixture
def world() -> World:
    return World()


def body(**fields: Any) -> bytes:
    whole = {"instance": "a", "epoch": 1, "sequence": 1, "available": 5}
    return json.dumps(whole | fields).encode()


# Heartbeats


def test_a_heartbeat_makes_a_row(world: World):
    assert world.ledger.receive(body(borrowed={"b": 2}, lent={"c": 3, "b": 1}))
    world.now += 1.5
    assert world.ledger.describe() == [
        {
            "engine": "a", "epoch": 1, "available": 5, "lent": {"b": 1, "c": 3},
            "borrowed": {"b": 2}, "age_s": 1.5, "fresh": True,
        }
    ]  # fmt: skip


def test_a_heartbeat_that_is_not_newer_changes_nothing(world: World):
    assert world.hear("a", 5, sequence=3, lent={"b": 2})
    world.now += 2
    assert not world.hear("a", 9, sequence=3)
    assert not world.hear("a", 9, sequence=2)
    (row,) = world.ledger.describe()
    assert (row["available"], row["age_s"], row["lent"]) == (5, 2.0, {"b": 2})
    assert world.hear("a", 9, sequence=4)
    (row,) = world.ledger.describe()
    assert (row["available"], row["age_s"], row["lent"]) == (9, 0.0, {})


def test_a_new_epoch_forgets_the_old_row(world: World):
    world.hear("a", 5, sequence=30, borrowed={"b": 2}, lent={"c": 3})
    assert world.hear("a", 1, epoch=2, sequence=0)
    (row,) = world.ledger.describe()
    assert (row["epoch"], row["available"], row["lent"], row["borrowed"]) == (2, 1, {}, {})
    with pytest.raises(StaleEpoch):
        world.hear("a", 5, sequence=31)
    assert world.available("a") == [1]


def test_an_old_row_has_nothing_available(world: World):
    world.hear("a", 5)
    world.now += FRESH_S
    assert world.available("a") == [5]
    assert world.ask("b", 1) == ["a"]
    world.now += 0.001
    assert world.available("a") == [0]
    assert world.ask("b", 1) == []
    assert not world.ledger.describe()[0]["fresh"]
    world.hear("a", 5, sequence=2)
    assert world.ask("b", 1) == ["a"]


def test_an_unknown_instance_has_nothing_available(world: World):
    assert world.available("a") == [0]
    assert world.ask("b", 1) == []


def test_a_removed_instance_is_forgotten_with_its_epoch(world: World):
    world.hear("a", 5, epoch=3)
    world.ledger.remove(EngineId("a"))
    world.ledger.remove(EngineId("a"))
    assert world.ledger.describe() == []
    assert world.hear("a", 4, epoch=1)


BAD: dict[str, tuple[bytes, str | None]] = {
    "no JSON": (b"{", None),
    "no UTF-8": (b'{"instance": "\xff"}', None),
    "a list": (b"[]", None),
    "a missing field": (json.dumps({"instance": "a"}).encode(), "epoch"),
    "an unknown field": (body(more=1), "more"),
    "a negative number": (body(available=-1), "available"),
    "a huge number": (body(available=2**31), "available"),
    "a float": (body(available=1.5), "available"),
    "a boolean": (body(available=True), "available"),
    "a negative epoch": (body(epoch=-1), "epoch"),
    "an epoch over 63 bits": (body(epoch=2**63), "epoch"),
    "a number in words": (body(sequence="1"), "sequence"),
    "no name": (body(instance=""), "instance"),
    "a long name": (body(instance="x" * 257), "instance"),
    "a name of control characters": (body(instance="a\n"), "instance"),
    "a debt of nothing": (body(borrowed={"b": 0}), "borrowed.b"),
    "a debt to nobody": (body(lent={"": 1}), "lent..[key]"),
    "a debt to oneself": (body(borrowed={"a": 1}), "borrowed"),
    "a loan to oneself": (body(lent={"a": 1}), "lent"),
    "too many creditors": (body(borrowed={str(n): 1 for n in range(1025)}), "borrowed"),
    "too many debtors": (body(lent={str(n): 1 for n in range(1025)}), "lent"),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("known", [True, False])
def test_a_bad_heartbeat_is_refused_and_changes_nothing(world: World, case: str, known: bool):
    text, param = BAD[case]
    if known:
        world.hear("a", 7, sequence=0)
    before = world.ledger.describe()
    with pytest.raises(BadRequest) as refused:
        world.ledger.receive(text)
    assert refused.value.param == param
    assert world.ledger.describe() == before


def test_as_many_debts_as_may_be_are_taken(world: World):
    assert world.ledger.receive(body(lent={str(n): 1 for n in range(1024)}))


def test_a_heartbeat_has_a_largest_size():
    world = World(max_bytes=100)
    text = body()
    assert world.ledger.receive(text + b" " * (100 - len(text)))
    with pytest.raises(TooLarge):
        world.ledger.receive(body(sequence=2) + b" " * 100)
    assert not world.ledger.receive(text)


def test_the_ledger_has_a_largest_number_of_instances():
    world = World(max_instances=2)
    world.hear("a", 1)
    world.now += 1
    world.hear("b", 2)
    with pytest.raises(NoCapacity):
        world.hear("c", 3)
    assert world.available("a", "b", "c") == [1, 2, 0]
    world.now += 1
    assert world.hear("a", 4, sequence=2)
    world.now += FRESH_S + 0.5  # now all are old, and b is the oldest
    assert world.hear("c", 3)
    assert [row["engine"] for row in world.ledger.describe()] == ["a", "c"]


def test_a_ledger_for_nobody_refuses_all():
    with pytest.raises(NoCapacity):
        World(max_instances=0).hear("a", 1)


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 5), st.integers(0, 9)), min_size=1),
    st.randoms(use_true_random=False),
)
def test_the_row_is_the_newest_heartbeat_in_whatever_order_they_arrive(
    sent: list[tuple[int, int, int]], order: random.Random
):
    world, heard = World(), {}
    for epoch, sequence, available in sent:
        heard.setdefault((epoch, sequence), available)
    messages = list(heard) * 2
    order.shuffle(messages)
    for epoch, sequence in messages:
        try:
            world.hear("a", heard[epoch, sequence], epoch=epoch, sequence=sequence)
        except StaleEpoch:
            assert epoch < max(heard)[0]
    assert world.available("a") == [heard[max(heard)]]


# Candidates


def test_three_candidates_by_cost_then_by_available_pages(world: World):
    for name, available in {"a": 99, "b": 5, "c": 30, "d": 40, "e": 50, "far": 99}.items():
        world.hear(name, available, epoch=7)
    asked = world.ledger.creditors(EngineId("a"), 5)
    assert asked == [Candidate("b", 7, 5), Candidate("e", 7, 50), Candidate("d", 7, 40)]


def test_equal_candidates_come_by_name(world: World):
    for name in "edcb":
        world.hear(name, 8)
    assert world.ask("stranger", 4) == ["b", "c", "d"]


def test_a_candidate_has_enough_pages_and_can_share_them(world: World):
    world.hear("a", 9)
    world.hear("b", 4)
    world.hear("c", 5)
    world.hear("far", 9)
    assert world.ask("a", 5) == ["c"]
    assert world.ask("far", 1) == []


@given(
    st.dictionaries(st.sampled_from("abcde"), st.integers(0, 20)),
    st.sampled_from("abcde"),
    st.integers(1, 20),
)
def test_candidates_are_the_best_three_of_all(rows: dict[str, int], debtor: str, size: int):
    world = World()
    for name, available in rows.items():
        world.hear(name, available)
    fit = [name for name in rows if name != debtor and rows[name] >= size]
    fit.sort(key=lambda name: (HOSTS[name] != HOSTS[debtor], -rows[name], name))
    assert world.ask(debtor, size) == fit[:3]
    assert world.available(*rows) == list(rows.values())  # a list is no loan


# Debts


def test_debts_are_what_both_sides_report(world: World):
    world.hear("a", borrowed={"b": 5, "c": 2, "d": 1, "unknown": 4})
    world.hear("b", lent={"a": 3, "e": 2})
    world.hear("c", lent={"a": 4}, borrowed={"b": 1})
    world.hear("d")
    assert world.ledger.debts() == {("a", "b"): 3, ("a", "c"): 2}


def test_an_old_row_hides_no_other(world: World):
    world.hear("d", borrowed={"b": 5})
    world.now += FRESH_S + 1
    world.hear("a", borrowed={"b": 5})
    world.hear("b", lent={"a": 5, "d": 5})
    assert world.ledger.debts() == {("a", "b"): 5}


@pytest.mark.parametrize("silent", ["a", "b"])
def test_debts_of_old_rows_do_not_count(world: World, silent: str):
    world.hear("a", borrowed={"b": 5})
    world.hear("b", lent={"a": 5})
    world.now += FRESH_S - 1
    if silent == "b":
        world.hear("a", borrowed={"b": 5}, sequence=2)
    else:
        world.hear("b", lent={"a": 5}, sequence=2)
    assert world.ledger.debts() == {("a", "b"): 5}
    world.now += 2
    assert world.ledger.debts() == {}


def test_a_debt_of_a_dead_process_does_not_count(world: World):
    world.hear("a", borrowed={"b": 5})
    world.hear("b", lent={"a": 5})
    world.hear("a", epoch=2)
    assert world.ledger.debts() == {}


def test_the_cost_is_asked_for_the_debtor_first():
    asked = []

    def one_way(debtor: EngineId, creditor: EngineId) -> float:
        asked.append((debtor, creditor))
        return 0.0

    ledger = Ledger(one_way, lambda: 0.0)
    ledger.record(Heartbeat(instance="b", epoch=1, sequence=1, available=5))
    ledger.creditors(EngineId("a"), 5)
    assert asked == [("a", "b")]
