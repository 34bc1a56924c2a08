"""Ranks candidates by their gain over what runs now, and says whether it is worth a change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Annotated, Any

import msgspec

from router.advice.candidates import Candidate

__all__ = ["LEAST_GAIN", "Ranking", "Result", "Row", "RunFigures", "rank"]

# A smaller gain is less than what virtual engines are off from real ones.
LEAST_GAIN = 0.05

Figure = Annotated[float, msgspec.Meta(ge=0.0, le=1e15)]
Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
Number = Annotated[int, msgspec.Meta(ge=0, le=2**31)]


Said = Annotated[str, msgspec.Meta(max_length=500)]
FIGURES = (
    "requests", "completed", "jct_ms", "ttft_ms", "ttft_p99_ms", "tpot_ms", "attained",
    "utilisation",
)  # fmt: skip


class RunFigures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One run of a candidate. Times are milliseconds; `None` if no request got so far."""

    requests: Number
    completed: Number
    jct_ms: Figure | None  # mean
    ttft_ms: Figure | None  # mean
    ttft_p99_ms: Figure | None
    tpot_ms: Figure | None  # mean
    attained: Share  # of the requests: within the objectives
    utilisation: Figure  # mean share of the time that engines compute
    error: Said = ""  # the most frequent one of requests that failed


@dataclass(frozen=True, slots=True)
class Result:
    """A candidate's runs, one for each seed, or why there are none."""

    candidate: Candidate
    runs: Sequence[RunFigures] = ()
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the ranking. Figures are means over the seeds.

    `gain` is the mean over the seeds, each against what runs now under the same seed, and `spread`
    is its standard deviation. `None` if it cannot be said. `alike` are candidates with the same
    figures in each run, which have no row of their own.
    """

    candidate: Candidate
    current: bool
    failure: str = ""
    figures: dict[str, float | None] | None = None
    gain: float | None = None
    spread: float | None = None
    alike: tuple[Candidate, ...] = ()

    @property
    def worth_it(self) -> bool:
        """Whether the gain is certain and large enough for a change."""
        return (
            not self.failure
            and self.gain is not None
            and self.spread is not None
            and self.gain >= LEAST_GAIN
            and self.gain > self.spread
        )

    def describe(self) -> dict[str, Any]:
        """Return the row as JSON values."""
        one = self.candidate
        return {
            "title": one.title, "name": one.name, "params": dict(one.params),
            "roles": dict(one.roles), "source_sha256": one.digest,
            "changes_roles": one.changes_roles, "current": self.current,
            "gain": self.gain, "spread": self.spread, "worth_it": self.worth_it,
            "failed": self.failure or None,
            "alike": [
                {"title": other.title, "name": other.name, "params": dict(other.params),
                 "roles": dict(other.roles), "source_sha256": other.digest}
                for other in self.alike
            ],
            **(self.figures or {}),
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Ranking:
    """All rows, the best first, and the one to change to; `None`: keep what runs now."""

    rows: list[Row]
    proposal: Row | None
    why: str


def rank(results: Sequence[Result], *, goodput: bool) -> Ranking:
    """Rank results; the first one is what runs now.

    With `goodput`, a gain is the difference in the share of requests within the objectives. Without
    it, it is the share by which the mean time of a request (JCT) is shorter. A candidate that
    completes fewer requests than what runs now has failed. Rows with failures come last. Candidates
    with the same figures under each seed share the row of the one that changes least.

    Of those whose gains differ from the largest one by less than its spread, one that leaves the
    roles of the engines as they are is proposed first.
    """
    now = results[0]
    groups = _alike(results)
    rows = [
        replace(_row(first, now, goodput), alike=tuple(other.candidate for other in others))
        for first, *others in groups
    ]
    order = sorted(rows, key=lambda row: (row.gain is None, -(row.gain or 0.0)))
    if rows[0].gain is None:
        why = f"keep what you have: it cannot be compared, since {rows[0].failure}"
        return Ranking(order, None, why)
    good = [row for row in order if row.worth_it]
    if not good:
        return Ranking(order, None, _keep(order))
    best = good[0]
    near = (best.gain or 0.0) - (best.spread or 0.0)
    as_good = [row for row in good if row is best or (row.gain or 0.0) >= near]
    proposal = min(as_good, key=lambda row: row.candidate.changes_roles)
    return Ranking(order, proposal, f"{proposal.candidate.title}: {_gain(proposal, goodput)}")


def _alike(results: Sequence[Result]) -> list[list[Result]]:
    """Return the results with the same runs together, in order.

    In a group, what runs now comes first, then those that leave the roles as they are. Results
    without runs stay apart.
    """
    groups: list[list[Result]] = []
    for result in results:
        same = [group for group in groups if result.runs and list(group[0].runs) == [*result.runs]]
        if same:
            same[0].append(result)
        else:
            groups.append([result])
    for group in groups:
        group.sort(key=lambda one: (one is not results[0], one.candidate.changes_roles))
    return groups


def _row(result: Result, now: Result, goodput: bool) -> Row:
    current = result is now
    if not result.runs:
        return Row(result.candidate, current, result.failure)
    figures = {name: _mean([getattr(run, name) for run in result.runs]) for name in FIGURES}
    lost = _lost(result, now)
    if lost or not now.runs:
        return Row(result.candidate, current, lost, figures)
    gains = [_gained(run, base, goodput) for run, base in zip(result.runs, now.runs, strict=True)]
    if any(gain is None for gain in gains):
        return Row(result.candidate, current, f"no request was completed{_why(result)}", figures)
    known = [gain for gain in gains if gain is not None]
    spread = stdev(known) if len(known) > 1 else 0.0
    return Row(result.candidate, current, "", figures, fmean(known), spread)


def _lost(result: Result, now: Result) -> str:
    """Return what a candidate fails at that what runs now does not; empty: nothing."""
    if result is now or not now.runs:
        return ""
    completed, before = (sum(run.completed for run in each.runs) for each in (result, now))
    if completed >= before:
        return ""
    requests = sum(run.requests for run in result.runs)
    return f"{requests - completed} of {requests} requests fail{_why(result)}"


def _why(result: Result) -> str:
    said = next((run.error for run in result.runs if run.error), "")
    return f": {said}" if said else ""


def _gained(run: RunFigures, base: RunFigures, goodput: bool) -> float | None:
    if goodput:
        return run.attained - base.attained
    if run.jct_ms is None or not base.jct_ms:
        return None
    return 1 - run.jct_ms / base.jct_ms


def _keep(order: Sequence[Row]) -> str:
    others = [row for row in order if not row.current and row.gain is not None]
    if not others and any(row.current and row.alike for row in order):
        return "keep what you have: the others behave the same under this traffic"
    if not others:
        return "keep what you have: nothing else could be compared"
    best = others[0]
    gain, spread = best.gain or 0.0, best.spread or 0.0
    if gain <= 0:
        return "keep what you have: nothing else is better"
    limit = f"within its spread of {spread:.1%}" if gain <= spread else f"below {LEAST_GAIN:.0%}"
    return f"keep what you have: the largest gain, {gain:.1%} by {best.candidate.title}, is {limit}"


def _gain(row: Row, goodput: bool) -> str:
    of = "more of the requests within the objectives" if goodput else "less time per request"
    return f"{row.gain or 0.0:.1%} ± {row.spread or 0.0:.1%} {of}"


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
