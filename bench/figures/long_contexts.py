"""Infinite-LLM, Figures 7, 8 and 10: requests longer than an instance's pool, in virtual time.

Instances borrow pages of each other, as engines with `--borrow` and `--lend-share`. The paper's
baseline (vLLM-v2) is one instance with all GPUs. Each arm runs under the same requests with three
seeds. `bench.figures.long_runs` runs an arm, and fails if one without borrowing refuses none of the
requests beyond a pool, or if one with it moves no block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from bench.figures.claims import NONE, Answer, Claim, Part, Verdict, by_effect, by_places
from bench.figures.long_runs import ARMS, Run, run
from bench.figures.long_settings import EIGHT_GPUS, FOUR_GPUS, Setting

__all__ = ["figure_8", "figure_10"]

SEEDS = (0, 1, 2)
ONE, REFUSES, BORROWS, SWAPS = ARMS
# The paper's gain, by the share of long requests.
GAINS = {0.01: (1.4, 2.4), 0.1: (1.1, 1.4), 0.3: (1.03, 1.3)}
# By setting and share: how many requests, and how many arrive in a second: more than are served.
LOADS = {
    FOUR_GPUS: {0.01: (100, 0.1), 0.1: (40, 0.07), 0.3: (40, 0.05)},
    EIGHT_GPUS: {0.01: (60, 0.15), 0.1: (40, 0.1), 0.3: (30, 0.06)},
}
OVER_TIME = EIGHT_GPUS, 0.3  # of Figure 10: four instances, and contexts of up to 480,000 tokens
Runs = dict[str, list[Run]]  # by arm, one for each seed


def figure_8() -> Part:
    """Throughput at saturation, with 1, 10 and 30 % of long requests."""
    rows: list[dict[str, Any]] = []
    times: list[dict[str, Any]] = []
    claims, served = [], {}
    for ratio, (low, high) in GAINS.items():
        answers, why = {}, []
        for setting in LOADS:
            runs = _runs(setting, ratio)
            gains = _over(runs[BORROWS], runs[ONE])
            verdict = _within(low, high, median(gains))
            answers[setting.name] = Answer(_shown(gains, "{:.2f}×"), verdict)
            why.append(f"{setting.name}: {_where(runs)}")
            rows += _rows(setting, ratio, runs)
            times += _times(setting, ratio, runs)
        claims.append(
            Claim(
                "Figure 8", f"{ratio:.0%} long requests: throughput {low}–{high}× of one instance "
                "with all GPUs", answers, " ".join(why),
            )
        )  # fmt: skip
    for setting in LOADS:
        found = [each for ratio in GAINS for each in _runs(setting, ratio)[BORROWS]]
        beyond, refused = sum(r.beyond for r in found), sum(r.refused for r in found)
        served[setting.name] = Answer(
            f"{beyond} requests, {refused} refused", by_places(each.refused == 0 for each in found)
        )
    claims.append(
        Claim(
            "Figure 7", "contexts longer than an instance's pool are served", served,
            "With all shares and seeds. Without borrowing, all of them are refused.",
        )
    )  # fmt: skip
    return Part({"rows": rows, "times": times}, claims)


def figure_10() -> Part:
    """Throughput over time of four instances, with and without borrowing and DGFM."""
    setting, ratio = OVER_TIME
    runs = _runs(setting, ratio)
    gains = [gain - 1 for gain in _over(runs[SWAPS], runs[BORROWS])]
    home = [each.home.get("swap", 0) for each in runs[SWAPS]]
    trends = {arm: [each.halves[1] / each.halves[0] - 1 for each in runs[arm]] for arm in ARMS}
    claims = [
        Claim(
            "Figure 10", "with DGFM, throughput stays above that without",
            {setting.name: Answer(
                f"{_shown(gains, '{:+.1%}')}, {median(home):.0f} blocks swapped home",
                by_places(gain > NONE for gain in gains),
            )},
            "Throughput of a run, with 30 % long requests, until the last one is done.",
        ),
        Claim(
            "Figure 10", "without DGFM, throughput falls over time",
            {setting.name: Answer(
                _shown(trends[BORROWS], "{:+.0%}"),
                by_places(trend < -NONE for trend in trends[BORROWS]),
            )},
            "The second half against the first one, until nine tenths of the requests have ended. "
            f"With DGFM {_shown(trends[SWAPS], '{:+.0%}')}; one instance "
            f"{_shown(trends[ONE], '{:+.0%}')}.",
        ),
    ]  # fmt: skip
    rows = [
        {"arm": arm, "refused": _sum(runs[arm], lambda each: each.refused),
         "context tokens/s, first half": _spread([each.halves[0] for each in runs[arm]]),
         "second half": _spread([each.halves[1] for each in runs[arm]]),
         "until the last is done": _spread([each.context_per_s for each in runs[arm]])}
        for arm in ARMS
    ]  # fmt: skip
    return Part({"rows": rows}, claims)


def _runs(setting: Setting, ratio: float) -> Runs:
    requests, rate = LOADS[setting][ratio]
    return {arm: [run(setting, arm, ratio, requests, rate, seed) for seed in SEEDS] for arm in ARMS}


def _over(runs: Sequence[Run], base: Sequence[Run]) -> list[float]:
    """Return the throughput of an arm over that of another one under the same requests."""
    return [ours.context_per_s / its.context_per_s for ours, its in zip(runs, base, strict=True)]


def _where(runs: Runs) -> str:
    """Return where the time of the instances that borrow has gone, and that of the one instance."""
    ours, one = runs[BORROWS], runs[ONE]
    bounds = [
        (its.long + its.other) * its.seconds / ((our.long + our.other) * our.seconds)
        for our, its in zip(ours, one, strict=True)
    ]
    return (
        f"{_mean(ours, lambda each: each.long + each.other):.0%} of the instances' time is in "
        f"steps (one instance: {_mean(one, lambda each: each.long + each.other):.0%}), "
        f"{_mean(ours, lambda each: each.shut):.0%} without a request while some wait at the "
        f"router, {_mean(ours, lambda each: each.waits):.0%} without a step while requests are "
        f"there; {_mean(ours, lambda each: each.again):.0%} of the prompts' tokens are computed "
        f"again. If these steps filled all of the time: {median(bounds):.2f}×."
    )


def _rows(setting: Setting, ratio: float, runs: Runs) -> list[dict[str, Any]]:
    """Return rows of the page's first table: what came out."""
    return [
        {
            "setting": setting.name,
            "long": f"{ratio:.0%}",
            "arm": arm,
            "requests": _sum(found, lambda each: each.completed + each.refused),
            "beyond a pool": _sum(found, lambda each: each.beyond),
            "refused": _sum(found, lambda each: each.refused),
            "context tokens/s": _spread([each.context_per_s for each in found]),
            "of one instance": _spread(_over(found, runs[ONE])),
            "blocks moved": _sum(found, lambda each: each.moved),
            "home": _sum(found, lambda each: sum(each.home.values())),
            "by swaps": _sum(found, lambda each: each.home.get("swap", 0)),
            "lost": _sum(found, lambda each: each.lost),
            "preempted": _sum(found, lambda each: each.preempted),
        }
        for arm, found in runs.items()
    ]


def _times(setting: Setting, ratio: float, runs: Runs) -> list[dict[str, Any]]:
    """Return rows of the page's second table: shares of the instances' time."""
    return [
        {
            "setting": setting.name,
            "long": f"{ratio:.0%}",
            "arm": arm,
            "steps with a context beyond a pool": _mean(found, lambda each: each.long),
            "other steps": _mean(found, lambda each: each.other),
            "no step, requests there": _mean(found, lambda each: each.waits),
            "no request, some at the router": _mean(found, lambda each: each.shut),
            "no request, none at the router": _mean(found, lambda each: each.idle),
            "attention for others": _mean(found, lambda each: each.lent),
            "pool in use": _mean(found, lambda each: each.pool),
            "prompts computed again": _mean(found, lambda each: each.again),
        }
        for arm, found in runs.items()
    ]


def _sum(runs: Sequence[Run], of: Callable[[Run], int]) -> int:
    return sum(map(of, runs))


def _mean(runs: Sequence[Run], of: Callable[[Run], float]) -> float:
    """Return a share as the mean of the seeds, in whole percent."""
    return round(sum(map(of, runs)) / len(runs), 2) + 0.0


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"min": min(values), "median": median(values), "max": max(values)}


def _shown(values: Sequence[float], form: str) -> str:
    """Return a median with the spread."""
    low, middle, high = (form.format(value) for value in (min(values), median(values), max(values)))
    return f"{middle} ({low} to {high})"


def _within(low: float, high: float, gain: float) -> Verdict:
    """Return the verdict on a factor for which the paper gives a range."""
    nearest = min(max(gain, low), high)
    return by_effect(nearest - 1, gain - 1)
