"""Limits how many requests are on a retry at a time: retries slow down all other requests."""

from __future__ import annotations

__all__ = ["Claim", "RetryBudget"]

RESERVE = 10  # retries that are always allowed: a share of few requests rounds to none


class Claim:
    """One request's part of the budget, held while the body of `with` runs.

    Once spent, it covers all retries of the request.
    """

    __slots__ = ("_budget", "spent")

    def __init__(self, budget: RetryBudget) -> None:
        self._budget = budget
        self.spent = False

    def __enter__(self) -> Claim:
        self._budget.running += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._budget.running -= 1
        self._budget.retrying -= self.spent

    def spend(self) -> bool:
        """Return whether the request may be retried once more."""
        if not self.spent and self._budget.left():
            self.spent = True
            self._budget.retrying += 1
        return self.spent


class RetryBudget:
    """At most `share` of the requests in flight, plus a few, are on a retry at any time.

    The first retry after the loss of an engine needs no budget: the loss hits all its requests at
    once, through no fault of theirs.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self.running = 0
        self.retrying = 0

    def left(self) -> bool:
        return self.retrying < RESERVE + self._share * self.running

    def request(self) -> Claim:
        """Return the claim of a new request."""
        return Claim(self)
