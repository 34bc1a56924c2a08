"""Disaggregation under load: Figures 10 and 11 of the microserving paper, scaled down.

Purpose: find out where data parallel, prefill-decode disaggregation and its balanced form are best,
and whether `balanced` with `ratio=auto` finds the best fixed ratio by itself.

Theory: two engines on a core each, one thread, are two devices. Under data parallel each engine's
decodes wait for its prefills. 1P1D keeps them apart, but has one engine for all prefills and one
for all decodes. With long prompts the prefill engine is the bottleneck (Figure 11). With short ones
the decode engine is (Figure 10); nothing can be moved there, and data parallel stays the best.
`balanced` moves a part of each prefill to the decode engine. `strategies/controller.py` has the
rule of `auto`, which learns from scratch in each run here.

How: SmolLM2 in bfloat16; prompts of 384 tokens and 12 out (Figure 11: 3000 and 100), and 26 in and
32 out (Figure 10: about 200 and 260). Open loop, Poisson arrivals, at three rates: shares of
the throughput of two saturated engines under data parallel, measured at the start. All strategies
get the same arrivals, and prompts of the same lengths that are in no cache. They alternate at each
rate of each repeat, in a different order each time, so that other load on the machine affects all
of them. Of each run: mean and P90 of JCT (job completion time), TTFT and TPOT;
published are medians over the repeats, with the spread.

`auto_vs_best_fixed`: mean JCT of `auto` over that of the best fixed ratio for that workload and
rate (0, which is 1P1D, 0.1, 0.2, 0.3), chosen in hindsight by its median. It is the median of the
repeats' ratios, because arrivals vary most. `others_cpu`: number of cores that other processes used
meanwhile. The router and the load generator share the cores with the engines.

With `--mock` the engines are real processes that sleep for the time of a step instead of computing.
This shows how requests queue on a machine whose cores are shared, where real engines would show
nothing. It is published under another name.

Run: `make bench-balance`, or `python -m bench.balance [--save] [--requests 60] [--repeats 3]
[--mock] [--from 3]`, which gives the arrivals of the repeats after the first three.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from bench.deployment import Deployment, deployed, machine_cpu_s
from bench.report import publish, spread, table
from router.engines.http_client import HttpClient
from router.load.client import Outcome, Target, closed_loop, open_loop
from router.telemetry import percentile
from router.workload import LoadRequest, WorkloadConfig, open_workload, poisson, timed

ENGINES = ("--prefill", "1", "--decode", "1", "--pool-pages", "4096")
CONNECT_S = 30.0
MODEL = ("smollm2", "--dtype", "bfloat16")
# The times of SmolLM2 on a quiet core of an AMD EPYC.
MOCK = ("mock", "--step-ms", "36", "--prefill-tokens-per-ms", "0.7")
WORKLOADS = {"figure 11": (384, 12), "figure 10": (26, 32)}
RATES = (0.5, 0.7, 0.9)  # shares of data parallel's throughput
STRATEGIES: dict[str, tuple[str, dict[str, Any]]] = {
    "data parallel": ("data_parallel", {}),
    "1P1D": ("prefill_decode", {}),
    "balanced 0.1": ("balanced", {"ratio": 0.1}),
    "balanced 0.2": ("balanced", {"ratio": 0.2}),
    "balanced 0.3": ("balanced", {"ratio": 0.3}),
    "balanced auto": ("balanced", {"ratio": "auto"}),
}
FIXED = ("1P1D", "balanced 0.1", "balanced 0.2", "balanced 0.3")
FULL = 24  # concurrent requests when measuring the saturated throughput
FIGURES: dict[str, Callable[[Outcome], float | None]] = {
    "jct": lambda outcome: outcome.end_s,
    "ttft": lambda outcome: outcome.first_token_s,
    "tpot": lambda outcome: outcome.per_token_s,
}
seeds = itertools.count(1)


def main() -> None:
    """Measure, print a table for each workload, publish the JSON."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--requests", type=int, default=60)
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--from", type=int, default=0, dest="first", metavar="REPEAT")
    options.add_argument("--mock", action="store_true", help="engines that sleep instead")
    options.add_argument("--save", action="store_true")
    given = options.parse_args()
    began = time.monotonic()
    model = MOCK if given.mock else MODEL
    with deployed(*model, *ENGINES) as deployment:
        repeats = range(given.first, given.first + given.repeats)
        runs, rates = asyncio.run(measure(deployment, model[0], given.requests, repeats))
    results = {
        workload: {
            f"{rate:.2f}/s": {name: summarize(repeats) for name, repeats in by_name.items()}
            for rate, by_name in zip(rates[workload], by_rate, strict=True)
        }
        for workload, by_rate in runs.items()
    }
    for workload, by_rate in results.items():
        show(workload, by_rate)
    versus = {
        workload: {
            f"{rate:.2f}/s": auto_over_best_fixed(by_name)
            for rate, by_name in zip(rates[workload], by_rate, strict=True)
        }
        for workload, by_rate in runs.items()
    }
    publish(
        "balance",
        {
            "engines": [*model, *ENGINES],
            "requests": given.requests,
            "repeats": given.repeats,
            "first_repeat": given.first,
            "minutes": round((time.monotonic() - began) / 60, 1),
            "load_average": os.getloadavg(),
            "auto_vs_best_fixed": versus,
            "jct_mean_ms_by_repeat": {
                workload: {
                    f"{rate:.2f}/s": {
                        n: [round(r["jct_mean_ms"]) for r in s] for n, s in by.items()
                    }
                    for rate, by in zip(rates[workload], by_rate, strict=True)
                }
                for workload, by_rate in runs.items()
            },
            "auto_vs_best_fixed_worst": max(max(by_rate.values()) for by_rate in versus.values()),
            "strongest": {
                workload: {rate: strongest(by_name) for rate, by_name in by_rate.items()}
                for workload, by_rate in results.items()
            },
            "results": results,
        },
        *(["--mock"] if given.mock else []),
        *([f"--from {given.first}"] if given.first else []),
    )


Run = dict[str, float]  # the figures of one strategy with one set of arrivals


async def measure(
    deployment: Deployment, model: str, count: int, repeats: Iterable[int]
) -> tuple[dict[str, list[dict[str, list[Run]]]], dict[str, list[float]]]:
    """Return all runs by workload, rate and strategy, and the rates (requests/s) by workload."""
    client = HttpClient(deployment.url, connect_timeout_s=CONNECT_S)
    try:
        greedy = {"ignore_eos": True, "temperature": 0}
        target = Target(client, model, greedy)
        rates = {
            workload: await _rates(target, deployment, lengths)
            for workload, lengths in WORKLOADS.items()
        }
        runs: dict[str, list[dict[str, list[Run]]]] = {
            workload: [{name: [] for name in STRATEGIES} for _ in RATES] for workload in WORKLOADS
        }
        for repeat in repeats:
            for (workload, lengths), (index, _) in itertools.product(
                WORKLOADS.items(), enumerate(RATES)
            ):
                rate = rates[workload][index]
                names = list(STRATEGIES)
                random.Random(f"{repeat} {workload} {index}").shuffle(names)
                for name in names:
                    times = poisson(1000 * repeat + index, rate)
                    run = await _run(target, deployment, name, lengths, count, times)
                    runs[workload][index][name].append(run)
                    print(
                        f"{workload} {rate:.2f}/s {name}: {json.dumps(_rounded(run))}",
                        file=sys.stderr,
                    )
        return runs, rates
    finally:
        client.close()


async def _rates(target: Target, deployment: Deployment, lengths: tuple[int, int]) -> list[float]:
    """Return shares of data parallel's saturated throughput (requests/s)."""
    deployment.use("data_parallel")
    await closed_loop(target, _requests(lengths, FULL // 4), FULL // 4)  # warm
    began = time.perf_counter()
    outcomes = await closed_loop(target, _requests(lengths, 2 * FULL), FULL)
    _check(outcomes)
    most = 2 * FULL / (time.perf_counter() - began)
    return [round(share * most, 2) for share in RATES]


async def _run(
    target: Target,
    deployment: Deployment,
    name: str,
    lengths: tuple[int, int],
    count: int,
    times: Iterator[float],
) -> Run:
    strategy, params = STRATEGIES[name]
    deployment.use(strategy, **params)
    began, ours, all_ = time.perf_counter(), deployment.cpu_s(), machine_cpu_s()
    outcomes = await open_loop(target, timed(_requests(lengths, count), times))
    took = time.perf_counter() - began
    _check(outcomes)
    run = {"others_cpu": (machine_cpu_s() - all_ - (deployment.cpu_s() - ours)) / took}
    for figure, read in FIGURES.items():
        values = [1e3 * value for value in map(read, outcomes) if value is not None]
        run[f"{figure}_mean_ms"] = statistics.fmean(values)
        run[f"{figure}_p90_ms"] = percentile(values, 90) or 0.0
    return run


def _requests(lengths: tuple[int, int], count: int) -> Iterator[LoadRequest]:
    """Yield prompts that are in no cache."""
    tokens_in, tokens_out = lengths
    config = WorkloadConfig("fixed", next(seeds), input=tokens_in, output=tokens_out)
    return itertools.islice(open_workload(config).requests, count)


def _check(outcomes: list[Outcome]) -> None:
    if wrong := [outcome for outcome in outcomes if not outcome.ok]:
        raise SystemExit(f"{len(wrong)} requests failed: {wrong[0].status} {wrong[0].error}")


def summarize(repeats: list[Run]) -> dict[str, dict[str, float]]:
    """Return each figure's median over the repeats, with the spread."""
    return {figure: spread([run[figure] for run in repeats]) for figure in repeats[0]}


def _rounded(run: Run) -> Run:
    return {figure: round(value, 2) for figure, value in run.items()}


def _jct(figures: dict[str, dict[str, float]]) -> float:
    return figures["jct_mean_ms"]["median"]


def auto_over_best_fixed(by_name: dict[str, list[Run]]) -> float:
    """Return the ratio of mean JCTs with the same arrivals."""
    means = {name: [run["jct_mean_ms"] for run in repeats] for name, repeats in by_name.items()}
    best = min((means[name] for name in FIXED), key=statistics.median)
    ratios = [auto / fixed for auto, fixed in zip(means["balanced auto"], best, strict=True)]
    return round(statistics.median(ratios), 3)


def strongest(by_name: dict[str, dict[str, dict[str, float]]]) -> str:
    """Return the strategy with the lowest mean JCT."""
    return min(by_name, key=lambda name: _jct(by_name[name]))


def show(workload: str, by_rate: dict[str, dict[str, dict[str, dict[str, float]]]]) -> None:
    """Print the table of one workload. The lowest mean JCT of each rate is marked."""
    tokens_in, tokens_out = WORKLOADS[workload]
    rows = []
    for rate, by_name in by_rate.items():
        for name, figures in by_name.items():
            mark = " *" if name == strongest(by_name) else ""
            cells = [
                f"{figures[f'{figure}_{of}_ms']['median']:.0f}"
                for figure, of in itertools.product(FIGURES, ("mean", "p90"))
            ]
            low, high = figures["jct_mean_ms"]["min"], figures["jct_mean_ms"]["max"]
            rows.append([f"{rate} {name}{mark}", *cells, f"{low:.0f}-{high:.0f}"])
    table(
        f"{workload}: {tokens_in} in / {tokens_out} out, ms, medians of repeats; * least mean JCT",
        ["", "JCT", "P90", "TTFT", "P90", "TPOT", "P90", "JCT spread"],
        rows,
    )


if __name__ == "__main__":
    main()
