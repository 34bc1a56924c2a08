"""A creditor's share of time, and a debtor's estimates."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kv_helpers import Clock

from kvcache.errors import BadRequest
from kvcache.remote_attention.creditor.budget import ComputeBudget
from kvcache.remote_attention.debtor.estimates import RunningEstimate


def test_what_exceeds_the_burst_is_waited_for():
    clock = Clock()
    budget = ComputeBudget(0.25, 0.1, clock)
    assert budget.wait_s() == 0
    budget.spend(0.3)
    assert budget.wait_s() == pytest.approx(0.8)
    clock.now += 0.8
    assert budget.wait_s() == pytest.approx(0, abs=1e-9)
    clock.now += 100.0
    budget.spend(0.1)
    assert budget.wait_s() == 0


def test_nothing_is_bounded_while_the_creditor_has_no_requests_of_its_own():
    clock, own = Clock(), [1]
    budget = ComputeBudget(0.1, 0.05, clock, lambda: bool(own))
    budget.spend(1.0)
    assert budget.wait_s() == pytest.approx(9.5)
    own.clear()
    assert budget.wait_s() == 0
    budget.spend(1.0)
    assert budget.wait_s() == 0
    own.append(1)  # what it computed before does not count
    assert budget.wait_s() == 0
    budget.spend(0.15)
    assert budget.wait_s() == pytest.approx(1.0)


@given(
    st.floats(0.01, 1),
    st.lists(st.tuples(st.floats(0, 0.5), st.floats(0, 0.2)), min_size=1, max_size=50),
)
def test_computations_take_no_more_than_their_share(
    share: float, requests: list[tuple[float, float]]
):
    """Each comes some time after the last one, waits as told, and takes some time."""
    clock = Clock()
    budget, began, computed, last = ComputeBudget(share, 0.05, clock), clock.now, 0.0, 0.0
    for pause, seconds in requests:
        clock.now += pause
        clock.now += budget.wait_s()
        assert computed <= share * (clock.now - began) + 0.05 + 1e-6
        clock.now += seconds
        budget.spend(seconds)
        computed, last = computed + seconds, seconds
    assert computed - last <= share * (clock.now - began) + 0.05 + 1e-6


@pytest.mark.parametrize(("share", "burst"), [(0, 1), (1.1, 1), (0.5, 0), (-1, 1)])
def test_shares_that_are_none(share: float, burst: float):
    with pytest.raises(BadRequest):
        ComputeBudget(share, burst, Clock())


def test_a_line_through_transfers():
    estimate = RunningEstimate()
    assert estimate.now().answer_s(1000, 1000) == 0
    for size in (1000, 5000, 20_000, 3000) * 5:
        estimate.add_transfer(size, 1e-4 + size * 2e-9)
        estimate.add_computation(2000, 4e-4, 1e-5)
    now = estimate.now()
    assert now.latency_s == pytest.approx(1e-4)
    assert now.s_per_byte == pytest.approx(2e-9)
    assert now.s_per_row_key == pytest.approx(2e-7)
    assert now.answer_s(10_000, 4000) == pytest.approx(1e-4 + 2e-5 + 8e-4 + 1e-5)
    assert now.samples == 20


def test_equal_sizes_tell_no_bandwidth():
    estimate = RunningEstimate()
    for _ in range(5):
        estimate.add_transfer(1000, 1e-4)
    assert (estimate.now().s_per_byte, estimate.now().latency_s) == (0, pytest.approx(1e-4))
