"""Rankings: gains against what runs now, their spread, and when to keep what one has."""

from __future__ import annotations

from typing import Any

import pytest

from router.advice.candidates import Candidate
from router.advice.ranking import LEAST_GAIN, Ranking, Result, RunFigures, rank

ROLES = {"a": "any", "b": "any"}
SPLIT = {"a": "prefill", "b": "decode"}


def runs(*jct: float | None, **fields: Any) -> list[RunFigures]:
    given = {
        "requests": 100, "completed": 100, "ttft_ms": 1.0, "ttft_p99_ms": 2.0, "tpot_ms": 1.0,
        "attained": 1.0, "utilisation": 0.5, **fields,
    }  # fmt: skip
    return [RunFigures(jct_ms=value, **given) for value in jct]


def result(name: str, *jct: float | None, roles: Any = None, **fields: Any) -> Result:
    candidate = Candidate(name, {}, roles or ROLES, roles is not None)
    return Result(candidate, runs(*jct, **fields))


def order(ranking: Ranking) -> list[str]:
    return [row.candidate.name for row in ranking.rows]


def test_the_shortest_mean_time_wins_if_it_does_so_under_each_seed():
    ranking = rank(
        [
            result("now", 100.0, 110.0, 120.0),
            result("good", 80.0, 88.0, 96.0),
            result("best", 50.0, 55.0, 60.0),
            result("worse", 120.0, 130.0, 140.0),
        ],
        goodput=False,
    )
    assert order(ranking) == ["best", "good", "now", "worse"]
    best = ranking.rows[0]
    assert ranking.proposal is best and best.gain == pytest.approx(0.5)
    assert best.spread == pytest.approx(0.0, abs=1e-12)
    assert ranking.why == "best: 50.0% ± 0.0% less time per request"
    assert best.figures is not None and best.figures["jct_ms"] == pytest.approx(55.0)


def test_seeds_are_compared_one_by_one():
    """The traffic of one seed is three times as slow for both: that is no spread of the gain."""
    ranking = rank([result("now", 100.0, 300.0), result("good", 80.0, 240.0)], goodput=False)
    assert ranking.rows[0].gain == pytest.approx(0.2)
    assert ranking.rows[0].spread == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize(
    ("jct", "why"),
    [
        ((70.0, 120.0, 60.0), "within its spread of 32.1%"),
        ((96.0, 96.0, 96.0), f"below {LEAST_GAIN:.0%}"),
        ((100.0, 100.0, 100.0), "the others behave the same"),
        ((130.0, 130.0, 130.0), "nothing else is better"),
    ],
)
def test_a_gain_within_its_spread_or_too_small_changes_nothing(jct, why):
    ranking = rank([result("now", 100.0, 100.0, 100.0), result("other", *jct)], goodput=False)
    assert ranking.proposal is None and ranking.why.startswith("keep what you have")
    assert why in ranking.why


def test_a_gain_just_beyond_its_spread_is_proposed():
    at_limit = (1 - LEAST_GAIN) * 100
    ranking = rank(
        [result("now", 100.0, 100.0), result("other", at_limit, at_limit)], goodput=False
    )
    assert ranking.proposal is not None and ranking.proposal.candidate.name == "other"


def test_of_equally_good_ones_the_roles_stay():
    """The first in the list of two as good, but one without new roles before all others."""
    several = [
        result("now", 100.0, 100.0, 100.0),
        result("split", 50.0, 60.0, 55.0, roles=SPLIT),
        result("like it", 60.0, 50.0, 55.0, roles=SPLIT),
        result("as it is", 53.0, 61.0, 56.0),
    ]
    ranking = rank(several, goodput=False)
    assert order(ranking)[:3] == ["split", "like it", "as it is"]
    assert ranking.proposal is not None and ranking.proposal.candidate.name == "as it is"
    ranking = rank(several[:3], goodput=False)
    assert ranking.proposal is not None and ranking.proposal.candidate.name == "split"
    far = result("as it is", 80.0, 80.0, 80.0)
    ranking = rank([*several[:3], far], goodput=False)
    assert ranking.proposal is not None and ranking.proposal.candidate.name == "split"


def test_candidates_that_behave_the_same_share_a_row():
    """What runs now stands for them, then one that leaves the roles as they are."""
    ranking = rank(
        [
            result("now", 100.0, 110.0),
            result("as now", 100.0, 110.0),
            result("split", 50.0, 60.0, roles=SPLIT),
            result("as split", 50.0, 60.0),
            result("nearly", 50.0, 60.0, ttft_ms=1.1),
        ],
        goodput=False,
    )
    assert order(ranking) == ["as split", "nearly", "now"]
    alike = [[one["title"] for one in row.describe()["alike"]] for row in ranking.rows]
    assert alike == [[Candidate("split", {}, SPLIT, True).title], [], ["as now"]]
    assert ranking.rows[2].current
    same = rank([result("now", 9.0, 9.0), result("as now", 9.0, 9.0)], goodput=False)
    assert same.why == "keep what you have: the others behave the same under this traffic"
    failed = [Result(Candidate(name, {}, ROLES), failure="it hangs") for name in "ab"]
    assert len(rank([result("now", 9.0, 9.0), *failed], goodput=False).rows) == 3


def test_goodput_counts_where_there_are_objectives():
    ranking = rank(
        [
            result("now", 100.0, 100.0, attained=0.5),
            result("faster", 50.0, 50.0, attained=0.4),
            result("better", 150.0, 150.0, attained=0.8),
        ],
        goodput=True,
    )
    assert order(ranking) == ["better", "now", "faster"]
    assert ranking.proposal is not None and ranking.proposal.gain == pytest.approx(0.3)
    assert "30.0% ± 0.0% more of the requests" in ranking.why


def test_who_loses_requests_is_not_proposed_however_fast_the_others_are():
    ranking = rank(
        [
            result("now", 100.0, 100.0),
            result("drops", 10.0, 10.0, completed=90),
            result("nothing", None, None, completed=0),
        ],
        goodput=False,
    )
    assert order(ranking)[0] == "now" and ranking.proposal is None
    assert [row.failure for row in ranking.rows[1:]] == [
        "20 of 200 requests fail", "200 of 200 requests fail",
    ]  # fmt: skip
    assert ranking.rows[1].figures is not None  # shown all the same


def test_a_failure_is_only_its_own_line():
    broken = Result(Candidate("broken", {}, ROLES), failure="it raised ValueError")
    ranking = rank([result("now", 9.0, 9.0), broken, result("good", 5.0, 5.0)], goodput=False)
    assert order(ranking) == ["good", "now", "broken"]
    assert ranking.rows[2].describe()["failed"] == "it raised ValueError"
    assert ranking.proposal is ranking.rows[0]


def test_without_what_runs_now_nothing_can_be_compared():
    broken = Result(Candidate("now", {}, ROLES), failure="it hangs")
    ranking = rank([broken, result("good", 5.0, 5.0)], goodput=False)
    assert ranking.proposal is None and "since it hangs" in ranking.why
    assert [row.gain for row in ranking.rows] == [None, None]
    nothing = result("now", None, None, completed=0)
    ranking = rank([nothing, result("good", 5.0, 5.0)], goodput=False)
    assert ranking.proposal is None and "no request was completed" in ranking.why
    assert rank([result("now", 5.0, 5.0)], goodput=False).proposal is None
