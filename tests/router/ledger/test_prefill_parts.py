from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.protocol import BadRequest, Heartbeat, NoCapacity
from router.base import EngineId
from router.ledger import Ledger, Part, plan_prefill

ME = EngineId("me")
HOSTS = {"me": 0, "near": 0, "b": 1, "c": 1, "d": 2}


def ledger_of(rows: dict[str, int]) -> Ledger:
    ledger = Ledger(lambda one, other: float(HOSTS[one] != HOSTS[other]), lambda: 0.0)
    for name, available in rows.items():
        ledger.record(Heartbeat(instance=name, epoch=1, sequence=1, available=available))
    return ledger


def available(ledger: Ledger) -> dict[str, int]:
    return {row["engine"]: row["available"] for row in ledger.describe()}


def test_a_prompt_that_fits_stays_at_home():
    ledger = ledger_of({"near": 9})
    assert plan_prefill(ledger, ME, 8, local=8) == [Part(ME, 0, 8)]
    assert available(ledger) == {"near": 9}


def test_the_end_stays_at_home_and_the_rest_goes_to_as_few_others_as_it_can():
    ledger = ledger_of({"me": 99, "near": 3, "b": 5, "c": 20, "d": 10})
    assert plan_prefill(ledger, ME, 30, local=8) == [
        Part("near", 0, 3), Part("c", 3, 22), Part(ME, 22, 30),
    ]  # fmt: skip
    assert available(ledger) == {"me": 99, "near": 0, "b": 5, "c": 1, "d": 10}


def test_small_creditors_are_left_out():
    ledger = ledger_of({"near": 3, "c": 20})
    assert plan_prefill(ledger, ME, 12, local=8, least=4) == [Part("c", 0, 4), Part(ME, 4, 12)]


def test_without_local_pages_all_of_it_goes_to_others():
    assert plan_prefill(ledger_of({"b": 3, "c": 2}), ME, 5, local=0) == [
        Part("b", 0, 3), Part("c", 3, 5),
    ]  # fmt: skip


def test_too_long_a_prompt_changes_nothing():
    ledger = ledger_of({"b": 3, "c": 2})
    with pytest.raises(NoCapacity):
        plan_prefill(ledger, ME, 14, local=8)
    assert available(ledger) == {"b": 3, "c": 2}
    with pytest.raises(NoCapacity):
        plan_prefill(ledger, ME, 12, local=8, least=4)


@pytest.mark.parametrize("wrong", [{"pages": 0}, {"local": -1}, {"least": 0}])
def test_bad_numbers_are_refused(wrong: dict[str, int]):
    values = {"pages": 4, "local": 2, "least": 1} | wrong
    with pytest.raises(BadRequest):
        plan_prefill(ledger_of({"b": 9}), ME, **values)


@given(
    st.dictionaries(st.sampled_from(["near", "b", "c", "d"]), st.integers(0, 12)),
    st.integers(1, 50),
    st.integers(0, 20),
    st.integers(1, 5),
)
def test_parts_cover_the_prompt_and_nobody_lends_more_than_it_has(
    rows: dict[str, int], pages: int, local: int, least: int
):
    ledger = ledger_of(rows)
    lendable = sum(each for each in rows.values() if each >= least)
    if pages > local + lendable:
        with pytest.raises(NoCapacity):
            plan_prefill(ledger, ME, pages, local=local, least=least)
        return
    parts = plan_prefill(ledger, ME, pages, local=local, least=least)
    assert [part.begin for part in parts] == [0, *(part.end for part in parts[:-1])]
    assert parts[-1].end == pages
    sizes = {part.instance: part.end - part.begin for part in parts}
    assert len(sizes) == len(parts)
    assert sizes.pop(ME, 0) == min(pages, local)
    assert all(0 < size <= rows[name] >= least for name, size in sizes.items())
    assert available(ledger) == {name: has - sizes.get(name, 0) for name, has in rows.items()}
