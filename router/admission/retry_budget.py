"""How many requests may be retried at a time: what is retried costs those that are not."""

from __future__ import annotations

__all__ = ["Claim", "RetryBudget"]

RESERVE = 10  # retries that are always allowed: a share of few is none


class Claim:
    """One request's part of the budget, counted while the body of `with` runs. It may be taken for
    more than one retry."""

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
        """Whether the request may be retried once more, for as long as it lasts."""
        if not self.spent and self._budget.left():
            self.spent = True
            self._budget.retrying += 1
        return self.spent


class RetryBudget:
    """At most `share` of the requests in flight (and a few) are on a retry at any time.

    The retry after an engine was lost is not asked for here: an engine's death concerns all that
    ran there at once, and they did not cause it.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self.running = 0
        self.retrying = 0

    def left(self) -> bool:
        return self.retrying < RESERVE + self._share * self.running

    def request(self) -> Claim:
        """One that begins."""
        return Claim(self)
