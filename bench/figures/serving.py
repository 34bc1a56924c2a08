"""Microserving, Figures 10, 11 and 13: patterns under load, at A100 scale in virtual time.

The paper does not say: the rates of its axes (but the highest of Figure 11, 2.5 per GPU), how many
requests a point has, and how many prompt tokens its engine takes in a step. Chosen are five rates
up to 2.5 for 3000 tokens, `FULL` requests and seeds, and whole prompts, as MLC-LLM's defaults have
it (`prefill_chunk_size` 8192, prompts and decodes in one step). `CHUNKS` shows what that decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from bench.figures.claims import Answer, Claim, Panel, Part, by_effect, by_places
from bench.figures.runs import (
    CHUNKS,
    OURS,
    PAPER,
    Arm,
    Size,
    Sweep,
    balance,
    data_parallel_pair,
    one_prefill,
    sweep,
)
from router.workload import WorkloadConfig

__all__ = ["FULL", "figure_10", "figure_11", "figure_13", "run_lengths", "token_budgets"]

FULL = Size(requests=400, seeds=3)
LENGTHS = (100, 200, 400, 1600)  # requests of a point, to see what their number decides
DP, P1D1, P1D2, BALANCE = "data parallel", "1P1D", "1P2D", "1P1D-balance"
AUTO = "1P1D-auto"
RATES_10 = (1.0, 3.0, 5.0, 7.0)
RATES_11 = (0.5, 1.0, 1.5, 2.0, 2.5)
RATES_5000 = (0.5, 0.75, 1.0, 1.25, 1.5, 1.75)
RATIOS = (0.1, 0.2, 0.3)
BUDGETS = (512, 1024, 2048, 8192)  # of a step, in tokens
RATIO = 0.2  # of Figures 10 and 11
Sweeps = dict[str, Sweep]  # by arm
PAIRS = [data_parallel_pair, one_prefill(1), balance(RATIO, BALANCE)]
PATTERNS = [*PAIRS, balance("auto", AUTO), one_prefill(2)]


def figure_10(size: Size = FULL, rates: Sequence[float] = RATES_10) -> Part:
    """ShareGPT-like requests: data parallel is strongest."""
    workload = WorkloadConfig("sharegpt")
    sweeps = {arm.name: sweep(PATTERNS, arm, workload, rates, size) for arm in (PAPER, OURS)}

    def stronger(one: Sweep) -> Answer:
        ratios = {name: one.ratios(name, DP) for name in (P1D1, BALANCE)}
        places = [ratio >= 0.98 for by_rate in ratios.values() for ratio in by_rate.values()]
        return Answer(
            f"{_range(ratios[P1D1])} 1P1D, {_range(ratios[BALANCE])} balance", by_places(places)
        )

    def weaker(one: Sweep) -> Answer:
        ratios = one.ratios(BALANCE, P1D1)
        return Answer(_range(ratios), by_places(ratio > 1 for ratio in ratios.values()))

    def double(one: Sweep) -> Answer:
        jct, tpot = one.ratios(P1D2, P1D1), one.ratios(P1D2, P1D1, time="tpot")
        places = [ratio < 1 for ratios in (jct, tpot) for ratio in ratios.values()]
        return Answer(f"TPOT {_range(tpot)}, JCT {_range(jct)}", by_places(places))

    def idle(one: Sweep) -> Answer:
        busy = {rate: point.busy for rate, point in one.points[P1D1].items()}
        text = ", ".join(f"{prefill:.0%} / {decode:.0%}" for prefill, decode in busy.values())
        return Answer(text, by_places(prefill < decode / 2 for prefill, decode in busy.values()))

    claims = [
        _claim(
            "10", "data parallel stays strong; 1P1D and balance bring no benefit (mean JCT over "
            "data parallel's)", stronger, sweeps, "Lengths are log-normal with the paper's means.",
        ),
        _claim("10", "1P1D-balance is worse than 1P1D (mean JCT over 1P1D's)", weaker, sweeps,
               "There is nothing to relieve: the prefill engine is idle most of the time."),
        _claim("10", "1P2D has lower TPOT and JCT than 1P1D (over 1P1D's)", double, sweeps,
               "At the same rate per GPU, so 1P2D has half as many requests more."),
        _claim("10", "the prefill engine is not fully used (busy share of prefill / decode engine)",
               idle, sweeps, "From the lowest to the highest rate."),
    ]  # fmt: skip
    return Part(
        _data(sweeps, size), claims,
        {f"figure-10-{_file(arm)}": _panels(one) for arm, one in sweeps.items()},
    )  # fmt: skip


def figure_11(size: Size = FULL, rates: Sequence[float] = RATES_11) -> Part:
    """3000 tokens in and 100 out: disaggregation pays, and balancing keeps it so."""
    workload = WorkloadConfig("paper")
    sweeps = {arm.name: sweep(PATTERNS, arm, workload, rates, size) for arm in (PAPER, OURS)}
    sweeps[CHUNKS.name] = sweep(PAIRS, CHUNKS, workload, rates, size)
    top, before = rates[-1], rates[-2]

    def gain(pattern: str, kind: str, paper: float, to: str = DP) -> Any:
        def answer(one: Sweep) -> Answer:
            ratios = one.ratios(pattern, to, kind)
            rate, ratio = min(ratios.items(), key=lambda each: each[1])
            return Answer(f"{_percent(ratio)} at {rate:g}/s", by_effect(paper, ratio - 1))

        return answer

    def tpot(one: Sweep) -> Answer:
        ratios = {name: one.ratios(name, DP, time="tpot") for name in (P1D1, BALANCE)}
        places = [ratio < 0.98 for by_rate in ratios.values() for ratio in by_rate.values()]
        return Answer(
            f"{_range(ratios[P1D1])} 1P1D, {_range(ratios[BALANCE])} balance", by_places(places)
        )

    def reversal(one: Sweep) -> Answer:
        means, p99 = one.ratios(P1D1, DP), one.ratios(P1D1, DP, "p99")
        ttft = one.points[P1D1][top].mean["ttft"] / one.points[P1D1][before].mean["ttft"]
        text = (
            f"mean {_percent(means[before])} → {_percent(means[top])}, "
            f"P99 {_percent(p99[before])} → {_percent(p99[top])}; TTFT × {ttft:.1f}"
        )
        return Answer(
            text, by_places([means[top] > means[before], p99[top] > p99[before], ttft > 1.5])
        )

    def kept(one: Sweep) -> Answer:
        to_dp, to_1p1d = one.ratios(BALANCE, DP)[top], one.ratios(BALANCE, P1D1)[top]
        p99_dp, p99_1p1d = (
            one.ratios(BALANCE, DP, "p99")[top],
            one.ratios(BALANCE, P1D1, "p99")[top],
        )
        text = (
            f"mean {_percent(to_dp)} of data parallel, {_percent(to_1p1d)} of 1P1D; "
            f"P99 {_percent(p99_dp)}, {_percent(p99_1p1d)}"
        )
        return Answer(text, by_places(ratio < 0.98 for ratio in (to_dp, to_1p1d, p99_dp, p99_1p1d)))

    why = "Best of all rates, as the paper's “up to”."
    claims = [
        _claim("11", "1P1D: mean JCT up to 21 % below data parallel", gain(P1D1, "mean", -0.21),
               sweeps, why),
        _claim("11", "1P1D-balance (0.2): mean JCT up to 21 % below data parallel",
               gain(BALANCE, "mean", -0.21), sweeps, why),
        _claim("11", "1P1D: P99 JCT up to 47 % below data parallel", gain(P1D1, "p99", -0.47),
               sweeps, f"{why} §4.1 says “disaggregation”, the caption balance: both are tested."),
        _claim("11", "1P1D-balance (0.2): P99 JCT up to 47 % below data parallel",
               gain(BALANCE, "p99", -0.47), sweeps, why),
        _claim("11", "1P1D-balance (0.2): P99 JCT up to 47 % below existing strategies: 1P1D",
               gain(BALANCE, "p99", -0.47, P1D1), sweeps,
               "The abstract's “existing strategies” have 1P1D among them."),
        _claim("11", "TPOT is much lower than data parallel's (mean, over data parallel's)", tpot,
               sweeps, "At every rate."),
        _claim("11", f"1P1D degrades at {top:g} requests/s and GPU, through TTFT (against data "
               f"parallel, from {before:g} to {top:g}/s)", reversal, sweeps,
               "One engine does all prefills: 5 prompts/s keep it busy 99 % of the time."),
        _claim("11", f"there 1P1D-balance keeps a low JCT (at {top:g}/s)", kept, sweeps,
               "Ratio 0.2 leaves the prefill engine a fifth less to do."),
    ]  # fmt: skip
    return Part(
        _data(sweeps, size), claims,
        {f"figure-11-{_file(arm)}": _panels(one, (P1D2,)) for arm, one in sweeps.items()},
    )  # fmt: skip


def run_lengths(lengths: Sequence[int] = LENGTHS, rate: float = RATES_11[-1]) -> Part:
    """Figure 11's highest rate with other numbers of requests, which the paper does not say."""
    rows = []
    for requests in lengths:
        one = sweep(PAIRS, PAPER, WorkloadConfig("paper"), [rate], Size(requests, FULL.seeds))
        rows.append(
            {"requests at 2.5/s": requests}
            | {
                f"{name}, {'P99' if kind == 'p99' else kind} JCT": _percent(
                    one.ratios(name, DP, kind)[rate]
                )
                for kind in ("mean", "p99")
                for name in (P1D1, BALANCE)
            }
        )
    return Part({"rows": rows}, [])


def token_budgets(budgets: Sequence[int] = BUDGETS, size: Size = FULL) -> Part:
    """Figure 11 with other numbers of prompt tokens in a step, which the paper does not say."""
    rows = []
    for budget in budgets:
        arm = Arm(f"budget {budget}", {"token_budget": budget, "decode_slowdown": 0.0})
        one = sweep(PAIRS, arm, WorkloadConfig("paper"), RATES_11[2:], size)
        row: dict[str, Any] = {"tokens in a step": budget}
        for kind, label in (("mean", "mean JCT"), ("p99", "P99 JCT")):
            for name in (P1D1, BALANCE):
                ratios = one.ratios(name, DP, kind)
                rate = min(ratios, key=lambda each: ratios[each])
                row[f"{name}, {label}"] = f"{_percent(ratios[rate])} at {rate:g}/s"
        rows.append(row)
    return Part({"rows": rows}, [])


def figure_13(
    size: Size = FULL, rates: Sequence[float] = RATES_11, rates_5000: Sequence[float] = RATES_5000
) -> Part:
    """Which part of the prompt to give to the decode engine, at 3000 and at 5000 tokens."""
    patterns = [balance(ratio) for ratio in RATIOS]
    names = [pattern.name for pattern in patterns]
    short, long = (
        {
            arm.name: sweep(patterns, arm, WorkloadConfig("paper", input=tokens), some, size)
            for arm in (PAPER, OURS)
        }
        for tokens, some in ((3000, rates), (5000, rates_5000))
    )

    def lowest(one: Sweep) -> Answer:
        found = [
            (ratio, rate, name)
            for name in names[1:]
            for rate, ratio in one.ratios(name, names[0], "p99").items()
        ]
        ratio, rate, name = max(found)
        return Answer(f"{ratio:.2f}× {name} at {rate:g}/s", by_effect(0.19, ratio - 1))

    def best(one: Sweep) -> dict[float, str]:
        some = one.points[names[0]]
        return {
            rate: min(names, key=lambda name: one.points[name][rate].p99["jct"]) for rate in some
        }

    def winners(one: Sweep) -> str:
        return ", ".join(
            f"{name.removeprefix('ratio ')} at {rate:g}/s" for rate, name in best(one).items()
        )

    def higher(one: Sweep) -> Answer:
        found = list(best(one).items())
        busy = found[len(found) // 2 :]
        return Answer(winners(one), by_places(name != names[0] for _, name in busy))

    def low_rates(one: Sweep) -> Answer:
        return Answer(winners(one), by_places(name == names[0] for name in best(one).values()))

    claims = [
        _claim("13", "3000 tokens: ratio 0.1 has up to 1.19× lower P99 JCT than higher ratios",
               lowest, short, "The largest advantage over 0.2 or 0.3 at any rate."),
        _claim("13", "3000 tokens: ratio 0.1 is best (lowest P99 JCT)", low_rates, short,
               "The paper gives no rates. Where one engine can hardly do all prefills, a higher "
               "ratio wins, as it says for 5000 tokens."),
        _claim("13", "5000 tokens: higher ratios win, above all at a high rate (lowest P99 JCT)",
               higher, long, "Judged by the upper half of the rates."),
    ]  # fmt: skip
    panels = [
        Panel(f"{tokens} tokens, {arm}", "requests/s and GPU", "P99 JCT (ms)",
              {name: _line(sweeps[arm], name, "p99", "jct") for name in names})
        for tokens, sweeps in ((3000, short), (5000, long))
        for arm in (PAPER.name, OURS.name)
    ]  # fmt: skip
    data = {"3000": _data(short, size), "5000": _data(long, size)}
    return Part(data, claims, {"figure-13": panels})


def _claim(figure: str, says: str, answer: Any, sweeps: Sweeps, why: str) -> Claim:
    return Claim(f"Figure {figure}", says, {arm: answer(one) for arm, one in sweeps.items()}, why)


def _data(sweeps: Sweeps, size: Size) -> dict[str, Any]:
    points = [
        asdict(point)
        for one in sweeps.values()
        for by_rate in one.points.values()
        for point in by_rate.values()
    ]
    return {**asdict(size), "points": points}


def _panels(one: Sweep, without: Sequence[str] = ()) -> list[Panel]:
    panels = []
    for time in ("ttft", "tpot", "jct"):
        lines = {}
        names = [name for name in one.points if name not in without]
        for name in names:
            lines[name] = _line(one, name, "mean", time)
            lines[f"{name} P99"] = _line(one, name, "p99", time)
        dashed = tuple(f"{name} P99" for name in names)
        panels.append(Panel(time.upper(), "requests/s and GPU", "ms", lines, dashed))
    return panels


def _line(one: Sweep, name: str, kind: str, time: str) -> list[tuple[float, float]]:
    return [(rate, getattr(point, kind)[time]) for rate, point in one.points[name].items()]


def _file(arm: str) -> str:
    return arm.replace("'", "").replace(" ", "-")


def _percent(ratio: float) -> str:
    return f"{ratio - 1:+.0%}".replace("-", "−").replace("%", " %")


def _range(ratios: dict[float, float]) -> str:
    return f"{min(ratios.values()):.2f}–{max(ratios.values()):.2f}"
