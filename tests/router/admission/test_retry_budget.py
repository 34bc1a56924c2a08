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
