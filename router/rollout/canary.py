"""A canary: a new revision that gets a share of the requests and is judged by two budgets.

Of its first `min_requests` requests, a share of `max_error_rate` may fail, and one in a hundred may
be slower than `max_ttft_p99_ms`. As soon as one of these budgets is overspent, the canary is rolled
back: later requests could not change the verdict. It is promoted when `min_requests` have ended
within both, which equals an error rate and a p99 (nearest rank) within their limits.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Literal

__all__ = ["Canary", "CanaryRules", "Verdict"]


@dataclass(frozen=True, slots=True)
class CanaryRules:
    """A canary's share and limits. Rates from 0 to 1, times in milliseconds."""

    percent: float = 5.0
    max_error_rate: float = 0.01
    max_ttft_p99_ms: float | None = None  # `None`: no limit
    min_requests: int = 100


@dataclass(frozen=True, slots=True)
class Verdict:
    """The decision about a canary, and its reason in words."""

    decision: Literal["promoted", "rolled_back"]
    why: str


class Canary:
    """The share and the results of one canary. `since` is when it began, in UTC."""

    def __init__(self, rules: CanaryRules) -> None:
        self.rules = rules
        self.ended = 0
        self.failed = 0
        self.slow = 0
        self.since = datetime.now(UTC).isoformat(timespec="seconds")
        self._share = 0.0
        self._may_fail = math.floor(rules.max_error_rate * rules.min_requests + 1e-9)
        self._may_be_slow = rules.min_requests - math.ceil(0.99 * rules.min_requests - 1e-9)

    def takes_next(self) -> bool:
        """Return whether it gets the next request: exactly `percent` of them, evenly spread."""
        self._share += self.rules.percent
        if self._share < 100.0:
            return False
        self._share -= 100.0
        return True

    def note(self, *, failed: bool, ttft_ms: float | None) -> Verdict | None:
        """Note that one of its requests has ended; return the verdict once there is one.

        `ttft_ms` is the time until its first token, or the time waited for one in vain.
        """
        self.ended += 1
        self.failed += failed
        self.slow += self.is_slow(failed=failed, ttft_ms=ttft_ms)
        return self.verdict()

    def is_slow(self, *, failed: bool, ttft_ms: float | None) -> bool:
        """Return whether a request counts against the budget of slow first tokens."""
        limit = self.rules.max_ttft_p99_ms
        return not failed and limit is not None and ttft_ms is not None and ttft_ms > limit

    def verdict(self) -> Verdict | None:
        """Return the verdict once there is one."""
        rules, limit = self.rules, self.rules.max_ttft_p99_ms
        if self.failed > self._may_fail:
            return Verdict(
                "rolled_back",
                f"{self.failed} of {self.ended} requests failed; of {rules.min_requests} at most "
                f"{self._may_fail} may",
            )
        if self.slow > self._may_be_slow:
            return Verdict(
                "rolled_back",
                f"{self.slow} of {self.ended} requests took over {limit:g} ms to their first "
                f"token; of {rules.min_requests} at most {self._may_be_slow} may (p99)",
            )
        if self.ended >= rules.min_requests:
            slow = "" if limit is None else f", {self.slow} took over {limit:g} ms to a token"
            return Verdict("promoted", f"{self.failed} of {self.ended} requests failed{slow}")
        return None

    def describe(self) -> dict[str, Any]:
        account = {"ended": self.ended, "failed": self.failed, "slow": self.slow}
        return {**asdict(self.rules), **account}
