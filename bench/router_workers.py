"""Requests per second of the router with one and with two worker processes.

Purpose: Python computes on one core. `--workers N` uses N of them; this bench measures what comes
of it, and what agreement and sharing cost.

Theory: engines and load generator use the same cores as the router. With `r` CPU seconds of the
router per request and `o` of all others, two cores serve at most 2 / (r + o) requests per second.
`most` is this rate over the one that one worker reaches. `on_own_cores` leaves the others out: how
many times as many requests two workers serve if each has a core. It is the CPU time of one worker
over that of the busier one of two, for the same requests. So it has what sharing costs and how
unevenly connections are spread, but no waiting for engines or clients.

How: two routers, with one and with two workers, each in front of two mock engines whose steps take
no time, get the same requests in turn, `REPEATS` times, from 32 connections that each wait for
their answer. The kernel chooses a connection's worker, so each repeat opens new ones. CPU seconds
are those of whole process trees.

- `answers`: whole answers of `TOKENS` tokens. The mock engines take more CPU than the router, so
  on two cores there is little left for a second worker.
- `tokenize`: `POST /tokenize`, which the router answers alone: what the second worker adds where
  the router is what limits.

Run: `make bench-router-workers`, or `python -m bench.router_workers [--save]`, on a machine of two
cores that does nothing else.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from bench.load import closed_loop, post
from bench.processes import tree_cpus_s
from bench.report import only_save, publish, spread, table
from bench.router import run
from bench.router_peers import Deployment, Process, deployed

TOKENS = 4
PROMPT = "Tell me, in four tokens, about the fox and the dog: 000000"
REPEATS = 7
COUNT, WARM_UP = 3000, 300
WORKERS = (1, 2)
FLAGS = ("--step-ms", "0", "--prefill-tokens-per-ms", "0")
WORK: dict[str, tuple[str, dict[str, Any]]] = {
    "answers": (
        "/v1/completions",
        {"model": "mock", "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0},
    ),
    "tokenize": ("/tokenize", {"model": "mock", "prompt": PROMPT}),
}


@dataclass(slots=True)
class Figures:
    """Of one work: requests per second and CPU µs of the router by workers; most of the ratio."""

    rates: dict[int, list[float]] = field(default_factory=lambda: {n: [] for n in WORKERS})
    cpu_us: dict[int, list[float]] = field(default_factory=lambda: {n: [] for n in WORKERS})
    most: list[float] = field(default_factory=list)
    busiest_us: dict[int, list[float]] = field(default_factory=lambda: {n: [] for n in WORKERS})

    @property
    def ratio(self) -> float:
        return statistics.median(self.rates[2]) / statistics.median(self.rates[1])

    @property
    def on_own_cores(self) -> float:
        return statistics.median(self.busiest_us[1]) / statistics.median(self.busiest_us[2])

    def document(self) -> dict[str, Any]:
        return {
            "ratio": round(self.ratio, 3),
            "most": round(statistics.median(self.most), 3),
            "on_own_cores": round(self.on_own_cores, 3),
            "requests_per_s": {str(count): spread(self.rates[count]) for count in WORKERS},
            "cpu_us": {str(count): spread(self.cpu_us[count]) for count in WORKERS},
        }


def main() -> None:
    """Measure, print the tables, publish the JSON."""
    only_save(__doc__)
    with (
        deployed(*FLAGS, peer=False) as one,
        deployed(*FLAGS, peer=False, router_flags=("--workers", "2")) as two,
    ):
        deployments = dict(zip(WORKERS, (one, two), strict=True))
        figures = {name: compare(deployments, *work) for name, work in WORK.items()}
    for name, found in figures.items():
        most = statistics.median(found.most)
        table(
            f"{name}: two workers are {found.ratio:.2f} times as fast as one; all CPU of two cores "
            f"allows {most:.2f}; on cores of their own, {found.on_own_cores:.2f}; "
            f"medians of {REPEATS}",
            ["workers", "requests/s", "spread", "CPU of the router per request, µs", "spread"],
            [
                [str(count), *_cells(found.rates[count]), *_cells(found.cpu_us[count])]
                for count in WORKERS
            ],
        )
    publish("router_workers", {name: found.document() for name, found in figures.items()})


def compare(deployments: dict[int, Deployment], path: str, body: dict[str, Any]) -> Figures:
    """Put one work on both routers in turn."""
    figures = Figures()
    for repeat in range(REPEATS + 1):
        for workers, deployment in deployments.items():
            count = COUNT if repeat else WARM_UP
            rate, ours, others, busiest = measure(deployment, path, body, count)
            if not repeat:
                continue
            figures.rates[workers].append(rate)
            figures.cpu_us[workers].append(1e6 * ours)
            figures.busiest_us[workers].append(1e6 * busiest)
            if workers == 1:
                figures.most.append(2 / (ours + others) / rate)
    return figures


def measure(
    deployment: Deployment, path: str, body: dict[str, Any], count: int
) -> tuple[float, float, float, float]:
    """Return requests per second, and CPU seconds per request of the router, of all others, and of
    the busiest process of the router."""
    router = deployment.ours
    workers = tree_cpus_s(router.pid)
    before = _cpu(deployment), time.process_time(), time.perf_counter()
    answers = run(closed_loop, router, _requests(router, path, body), count)
    after = _cpu(deployment), time.process_time(), time.perf_counter()
    busiest = max(now - workers.get(pid, 0.0) for pid, now in tree_cpus_s(router.pid).items())
    if wrong := [answer for answer in answers if answer.status != 200]:
        raise SystemExit(f"{len(wrong)} requests failed: {wrong[0].body[:200]!r}")
    ours, engines = (new - old for old, new in zip(before[0], after[0], strict=True))
    others = engines + after[1] - before[1]
    return count / (after[2] - before[2]), ours / count, others / count, busiest / count


def _cpu(deployment: Deployment) -> tuple[float, float]:
    """Return the CPU seconds of the router's processes, and of the engines."""
    return deployment.ours.cpu_s(), sum(engine.cpu_s() for engine in deployment.engines)


def _requests(router: Process, path: str, body: dict[str, Any]) -> Callable[[int], bytes]:
    before, _, after = post(router.url, path, json.dumps(body).encode()).partition(b"000000")
    return lambda number: b"%b%06d%b" % (before, number, after)


def _cells(values: list[float]) -> list[str]:
    told = spread(values)
    return [f"{told['median']:.0f}", f"{told['min']:.0f}-{told['max']:.0f}"]


if __name__ == "__main__":
    main()
