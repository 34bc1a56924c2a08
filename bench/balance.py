"""Disaggregation under load: Figures 10 and 11 of the microserving paper on real engines.

Purpose: find out where data parallel, prefill-decode disaggregation and its balanced form are best,
and whether `balanced` with `ratio=auto` finds the best fixed ratio by itself.

Theory: two engines on a core each, one thread, are two devices. Under data parallel each engine's
decodes wait for its prefills. 1P1D keeps them apart, but has one engine for all prefills and one
for all decodes. With long prompts the prefill engine is the bottleneck (Figure 11). With short ones
the decode engine is (Figure 10); nothing can be moved there, and data parallel stays the best.
`balanced` moves a part of each prefill to the decode engine. `strategies/controller.py` has the
rule of `auto`, which learns from scratch in each run here.

How: SmolLM2 in bfloat16, or in the dtype that `--dtype` says. Lengths are normal with the paper's
deviation of 5 tokens. Figure 11 has 384 tokens in and 80 out, so that the times of prefill and
decode are to each other about as in the paper (3000 and 100: 1 to 4.5). Figure 10 has 26 in and 32
out (the paper: about 200 and 260). Open loop, Poisson arrivals, at `SHARES` of the throughput of
1P1D when it is full, that is of its weaker stage. Rates are requests per second and engine, as the
paper's are per GPU. Three arms get the same arrivals and lengths, and prompts that are in no cache;
they alternate in a different order each time, so that other load on the machine affects all of
them:

- `unpaced`: `--decode-slowdown 0`. Prompts delay decodes as they do in the paper's engine.
- `paced`: our default, which limits how much prompts delay the decodes of the same engine; without
  the ratios 0.1 and 0.3.
- `vLLM`: two servers of vLLM, which get requests in turn (data parallel). Without its environment
  (`make peers`) the arm is left out.

Published of each run: mean and P99 of JCT (job completion time), TTFT and TPOT as medians over the
repeats with the spread. `over_data_parallel`: mean and P99 JCT over those of data parallel in the
same arm and repeat. `auto_vs_best_fixed`: mean JCT of `auto` over that of the arm's best fixed
ratio for that workload and rate (0, which is 1P1D, 0.1, 0.2, 0.3), chosen in hindsight by its
median.
`others_cpu`: number of cores that other processes used meanwhile. The router and the load
generator share the cores with the engines.

With `--mock` the engines are real processes that sleep for the time of a step instead of computing,
and vLLM is left out. This shows how requests queue on a machine whose cores are shared, where real
engines would show nothing. It is published under another name.

Run: `make bench-balance`, or `python -m bench.balance [--save] [--requests 36] [--repeats 3]
[--figure 11] [--dtype float32] [--mock] [--runs FILE]`. With a file, the bench goes on where an
earlier one failed.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from bench.balance_arms import STRATEGIES, Arm, Ours, our_arm, vllm_arm
from bench.processes import machine_cpu_s
from bench.real_load import TIMES, check, unseen_requests
from bench.report import publish, spread, table
from router.telemetry import percentile
from router.workload import WorkloadConfig

ENGINES = ("--prefill", "1", "--decode", "1", "--pool-pages", "4096")
MODEL = "smollm2"
# The times of SmolLM2 on a quiet core of an AMD EPYC.
MOCK = ("mock", "--step-ms", "36", "--prefill-tokens-per-ms", "0.7")
WORKLOADS = {
    "11": WorkloadConfig("paper", input=384, output=80),
    "10": WorkloadConfig("paper", input=26, output=32),
}
SHARES = (0.5, 0.75, 0.95)  # of 1P1D's throughput
# The strategies of our arms, and the flags of their engines.
OUR_ARMS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "unpaced": (tuple(STRATEGIES), ("--decode-slowdown", "0")),
    "paced": (("data parallel", "1P1D", "balanced 0.2", "balanced auto"), ()),
}
FIXED = ("1P1D", "balanced 0.1", "balanced 0.2", "balanced 0.3")
WARM = 6  # requests before the first run of an arm
FULL = 24  # concurrent requests when measuring the saturated throughput
BASE = "data parallel"
SHOWN = ("jct", "ttft", "tpot")

Run = dict[str, Any]  # the figures of one strategy with one set of arrivals
Runs = dict[str, dict[str, list[Run]]]  # by arm and strategy: a run of each repeat


def main() -> None:
    """Measure, print the tables, publish the JSON."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--requests", type=int, default=36)
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--runs", type=Path, metavar="FILE", help="keep each run in this file")
    options.add_argument("--dtype", default="bfloat16")
    options.add_argument("--figure", choices=sorted(WORKLOADS), help="only this one")
    options.add_argument("--mock", action="store_true", help="engines that sleep instead")
    options.add_argument("--save", action="store_true")
    given = options.parse_args()
    began = time.monotonic()
    model = MOCK if given.mock else (MODEL, "--dtype", given.dtype)
    kept = Kept(given.runs)
    figures = [given.figure] if given.figure else list(WORKLOADS)
    with ExitStack() as stack:
        arms: dict[str, Arm] = {
            name: stack.enter_context(our_arm(model, strategies, *ENGINES, *flags))
            for name, (strategies, flags) in OUR_ARMS.items()
        }
        if not given.mock and (vllm := stack.enter_context(vllm_arm(MODEL, given.dtype))):
            arms["vLLM"] = vllm
        runs = {
            figure: asyncio.run(measure(arms, figure, given.requests, given.repeats, kept))
            for figure in figures
        }
    others = [
        run["others_cpu"]
        for by_rate in runs.values()
        for arms in by_rate.values()
        for strategies in arms.values()
        for each in strategies.values()
        for run in each
    ]
    results = {
        figure: {rate: summarize(of_rate) for rate, of_rate in by_rate.items()}
        for figure, by_rate in runs.items()
    }
    for figure, by_rate in results.items():
        show(figure, by_rate)
    publish(
        "balance",
        {
            "engines": [*model, *ENGINES],
            "requests": given.requests,
            "repeats": given.repeats,
            "minutes": round((time.monotonic() - began) / 60, 1),
            "others_cpu": max(others),
            "results": results,
        },
        *(["--mock"] if given.mock else []),
        *([f"--figure {given.figure}"] if given.figure else []),
    )


class Kept:
    """The rates and runs of a file, to which each new one is added. Without a file: none."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._found: dict[tuple[str, ...], Any] = {}
        if path is not None and path.exists():
            for line in path.read_text().splitlines():
                key, value = json.loads(line)
                self._found[tuple(key)] = value

    async def get(self, *key: str, measure: Callable[[], Awaitable[Any]]) -> Any:
        """Return what is kept under a key, or measure and keep it."""
        if key not in self._found:
            self._found[key] = value = await measure()
            line = json.dumps([key, value])
            print(line, file=sys.stderr)
            if self._path is not None:
                with self._path.open("a") as file:
                    file.write(line + "\n")
        return self._found[key]


async def measure(
    arms: Mapping[str, Arm], figure: str, count: int, repeats: int, kept: Kept
) -> dict[str, Runs]:
    """Return all runs of a figure's workload by rate (requests per second and engine)."""
    workload = WORKLOADS[figure]
    ours = arms["unpaced"]
    assert isinstance(ours, Ours)
    for arm in arms.values():
        warm = replace(workload, rate=1.0, seed=WARM)
        check(await arm.run(arm.strategies[0], list(unseen_requests(warm, WARM))))

    async def rates_of_1p1d() -> list[float]:
        most = await ours.saturate("1P1D", list(unseen_requests(workload, 3 * FULL)), FULL)
        return [round(share * most / 2, 3) for share in SHARES]

    rates = await kept.get(figure, "rates", measure=rates_of_1p1d)
    runs: dict[str, Runs] = {
        f"{rate:g}/s": {
            name: {strategy: [] for strategy in arm.strategies} for name, arm in arms.items()
        }
        for rate in rates
    }
    pairs = [(arm, strategy) for arm, each in arms.items() for strategy in each.strategies]
    for repeat, (index, rate) in itertools.product(range(repeats), enumerate(rates)):
        drawn = replace(workload, seed=1000 * repeat + index, rate=2 * rate)
        random.Random(f"{repeat} {figure} {index}").shuffle(pairs)
        for name, strategy in pairs:
            run = await kept.get(
                figure, f"{rate:g}/s", name, strategy, str(repeat),
                measure=partial(_run, arms[name], strategy, drawn, count),
            )  # fmt: skip
            runs[f"{rate:g}/s"][name][strategy].append(run)
    return runs


async def _run(arm: Arm, strategy: str, workload: WorkloadConfig, count: int) -> Run:
    requests = list(unseen_requests(workload, count))
    began, used, machine = time.perf_counter(), arm.cpu_s(), machine_cpu_s()
    outcomes = await arm.run(strategy, requests)
    took = time.perf_counter() - began
    others_s = machine_cpu_s() - machine - (arm.cpu_s() - used)
    check(outcomes)
    run: Run = {"others_cpu": round(others_s / took, 2)}
    for name, read in TIMES.items():
        values = [1e3 * value for value in map(read, outcomes) if value is not None]
        run[f"{name}_mean_ms"] = round(statistics.fmean(values), 2)
        run[f"{name}_p99_ms"] = round(percentile(values, 99) or 0.0, 2)
    return run


def summarize(arms: Runs) -> dict[str, dict[str, Any]]:
    """Return the figures of one rate, by arm and strategy."""
    found: dict[str, dict[str, Any]] = {}
    for arm, strategies in arms.items():
        found[arm] = {}
        for name, runs in strategies.items():
            times = [f"{time}_{of}_ms" for time in TIMES for of in ("mean", "p99")]
            found[arm][name] = {
                **{key: spread([run[key] for run in runs]) for key in times},
                "over_data_parallel": {
                    of: _over(runs, strategies[BASE], f"jct_{of}_ms") for of in ("mean", "p99")
                },
            }  # fmt: skip
        if "balanced auto" in strategies:
            fixed = [name for name in FIXED if name in strategies]
            best = min(fixed, key=lambda name: found[arm][name]["jct_mean_ms"]["median"])
            found[arm]["balanced auto"]["auto_vs_best_fixed"] = {
                "best": best, **_over(strategies["balanced auto"], strategies[best], "jct_mean_ms"),
            }  # fmt: skip
    return found


def _over(runs: list[Run], others: list[Run], key: str) -> dict[str, float]:
    """Return the ratios with the same arrivals."""
    return spread([one[key] / other[key] for one, other in zip(runs, others, strict=True)])


def show(figure: str, by_rate: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> None:
    """Print the table of a figure. The lowest mean JCT of each rate is marked."""
    rows = []
    for rate, arms in by_rate.items():
        found = {(arm, name): one for arm, each in arms.items() for name, one in each.items()}
        least = min(found, key=lambda key: found[key]["jct_mean_ms"]["median"])
        for key, one in found.items():
            ratios = one["over_data_parallel"]
            rows.append([
                " ".join((rate, *key)) + (" *" if key == least else ""),
                *(f"{one[f'{time}_mean_ms']['median']:.0f}" for time in SHOWN),
                f"{one['jct_p99_ms']['median']:.0f}",
                *(f"{ratios[of]['median']:.2f} ({ratios[of]['min']:.2f}-{ratios[of]['max']:.2f})"
                  for of in ("mean", "p99")),
            ])  # fmt: skip
    workload = WORKLOADS[figure]
    table(
        f"Figure {figure}: {workload.input} in / {workload.output} out, ms, medians of repeats; "
        "* least mean JCT",
        ["rate per engine, arm, strategy", "JCT", "TTFT", "TPOT", "P99 JCT", "over DP", "P99"],
        rows,
    )  # fmt: skip


if __name__ == "__main__":
    main()
