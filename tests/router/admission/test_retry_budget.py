"""The share of requests that may be retried."""

from __future__ import annotations

from contextlib import ExitStack

from router.admission.retry_budget import RESERVE, RetryBudget


def test_the_budget_is_a_share_of_requests_in_flight_plus_a_reserve():
    budget = RetryBudget(0.2)
    with ExitStack() as requests:
        claims = [requests.enter_context(budget.request()) for _ in range(100)]
        granted = [claim.spend() for claim in claims]
        assert granted == [True] * (RESERVE + 20) + [False] * (70 - 0)
        assert claims[0].spend()  # its second retry needs no further budget
        assert budget.retrying == RESERVE + 20
    assert (budget.running, budget.retrying) == (0, 0)


def test_a_finished_request_returns_its_retry():
    budget = RetryBudget(0.0)
    for _ in range(3 * RESERVE):
        with budget.request() as claim:
            assert claim.spend()
    assert not budget.retrying


def test_ten_retries_are_always_allowed():
    budget = RetryBudget(0.0)
    with ExitStack() as requests:
        claims = [requests.enter_context(budget.request()) for _ in range(20)]
        assert [claim.spend() for claim in claims] == [True] * 10 + [False] * 10
        assert (budget.running, budget.retrying) == (20, 10)
        assert [claim.spent for claim in claims] == [True] * 10 + [False] * 10
        requests.pop_all().close()
        assert (budget.running, budget.retrying) == (0, 0)
    with budget.request() as claim:
        assert claim.spend()


def test_the_share_counts_what_runs_now():
    budget = RetryBudget(0.5)
    with ExitStack() as requests:
        few = [requests.enter_context(budget.request()) for _ in range(2)]
        budget.retrying = 10
        assert few[0].spend()  # 11 of 10 and a half of 2
        assert not few[1].spend()
        for _ in range(2):
            requests.enter_context(budget.request())
        assert few[1].spend()
