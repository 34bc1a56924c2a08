"""Loose coherence: by old ledgers and over a bad network, no page gets two users or is lost.

Infinite-LLM, section 4.4. The fleet checks at every event that each page has one user.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lending_fleet import BAD, CALM, Conditions, Fleet

from kvcache.errors import Internal
from kvcache.lending import Borrower, Lender
from kvcache.types import LeaseId, PageId

pytestmark = pytest.mark.slow

shares = st.sampled_from([0.0, 0.02, 0.1, 0.3])
conditions = st.builds(
    Conditions,
    lost=shares,
    repeated=shares,
    slow=shares,
    slow_s=st.sampled_from([0.5, 5.0, 20.0]),
    heartbeat_s=st.sampled_from([0.2, 1.0, 5.0]),
    restarts_per_s=st.sampled_from([0.0, 0.01, 0.1]),
)


@settings(max_examples=30)
@given(conditions, st.integers(0, 2**32))
def test_no_page_has_two_users_and_all_are_free_at_the_end(bad: Conditions, seed: int):
    fleet = Fleet("abcde", bad, seed)
    fleet.run(15.0)
    fleet.end()
    assert fleet.all_free()


def test_the_histories_meet_every_case():
    seen = sum((run(BAD, seed).seen for seed in range(6)), start=Fleet("", BAD, 0).seen)
    for case in (
        "granted", "refused", "asked again", "granted too late", "late allocation", "expired",
        "call back", "called back", "gave back what was called back", "lost to time",
        "lost to a death", "restart", "heartbeat", "old heartbeat", "heartbeat of the dead",
        "allocation by or at the dead", "free by or at the dead", "lost",
    ):  # fmt: skip
        assert seen[case], case


def test_where_no_message_is_lost_no_loan_is_lost():
    fleet = run(CALM, 0)
    assert fleet.seen["granted"] > 20
    assert not fleet.seen["lost to a death"] and not fleet.seen["granted too late"]


class Hasty(Lender):
    """Frees loans before the debtor's deadline."""

    def sweep(self) -> int:
        return self._end([each for each in self.loans() if self._clock() > each.deadline - 2.0])


class Forgetful(Lender):
    """Ignores that a debtor's older process has ended."""

    def _meet(self, debtor: str, epoch: int) -> None:
        self._epochs[debtor] = epoch  # type: ignore[index]


class Trusting(Borrower):
    """Counts its deadline from the answer, not from the request."""

    def granted(self, lease_id: LeaseId, pages: Sequence[PageId], lease_s: float) -> bool:
        if (debt := self._asked.get(lease_id)) is not None:
            debt.asked = self._clock()
        return super().granted(lease_id, pages, lease_s)


class Sloppy(Borrower):
    """Uses pages that it has given back."""

    def give_back(self, lease_id: LeaseId, pages: object = None) -> list[PageId]:
        return list(self._debts[lease_id].pages)


@pytest.mark.parametrize(
    "broken",
    [{"lender": Hasty}, {"lender": Forgetful}, {"borrower": Trusting}, {"borrower": Sloppy}],
)
def test_the_fleet_finds_what_is_broken(broken: dict[str, type]):
    with pytest.raises((AssertionError, Internal), match=r"is used and not lent|earlier process"):
        for seed in range(40):
            fleet = Fleet("abcde", BAD, seed, **broken)
            fleet.run(30.0)


def run(bad: Conditions, seed: int) -> Fleet:
    fleet = Fleet("abcde", bad, seed)
    fleet.run(30.0)
    fleet.end()
    assert fleet.all_free()
    return fleet
