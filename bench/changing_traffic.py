"""Strategies under traffic that changes, in virtual time.

Purpose: whether `adaptive` follows the traffic: how far it is, in each phase and over all, from the
strategy that is best there.

Theory: short prompts fit in a step beside decodes, so any engine may take them. Long prompts that
need more of the engines' time than these give to prompts beside decodes are better kept apart from
them. Contexts that many requests share are best answered where they are cached. Each of these has
a strategy of its own. A policy needs some time to notice a change, and pays for it.

How: three phases with a short pause between them. Lengths are log-normal, arrivals Poisson, with
the same requests for all strategies. Engines are virtual: the real scheduler and bookkeeping, with
the times of Llama-3.1-8B on an A100 (`engine/latency/profiles`).

Run: `make bench-changing-traffic`, or `python -m bench.changing_traffic [--save]`.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.report import only_save, publish, table
from router.simulation import Experiment, read_fleet, run_experiment
from router.strategy import Bound
from router.workload import WorkloadConfig
from strategies.adaptive import adaptive
from strategies.balanced import balanced
from strategies.cache_aware import cache_aware
from strategies.data_parallel import data_parallel
from strategies.prefill_decode import prefill_decode

PROFILE = "llama-3.1-8b@a100"
BLOCK = 512  # tokens of a block in Mooncake's traces
PAUSE_S = 5.0
PROMPT_SIGMA, ANSWER_SIGMA = 0.5, 0.4
STRATEGIES = {
    "data_parallel": data_parallel.bind({}),
    "cache_aware": cache_aware.bind({}),
    "prefill_decode": prefill_decode.bind({}),
    "balanced, auto": balanced.bind({"ratio": "auto"}),
    "adaptive": adaptive.bind({}),
}
ADAPTIVE = "adaptive"
FLEETS = {"four engines without roles": (4, 0), "two prefill and two decode": (4, 2)}
SEEDS = (1, 2, 3)


@dataclass(frozen=True, slots=True)
class Phase:
    """Requests of one kind. `rate` is for each engine, per second; lengths are medians."""

    name: str
    seconds: float
    rate: float
    new: int  # tokens of a prompt that no other has
    answer: int
    contexts: int = 0  # for each engine; a prompt begins with one of them
    blocks: int = 0  # of a context


PHASES = (
    Phase("chat", 60, 6.25, 250, 150),
    Phase("long prompts", 40, 2, 3000, 100),
    Phase("shared contexts", 40, 4, 100, 100, contexts=5, blocks=6),
)
Figures = dict[str, list[float]]  # by phase, and over all: seconds of each request


def write_trace(path: Path, phases: Sequence[Phase], engines: int, seed: int) -> list[float]:
    """Write a trace in Mooncake's format; return when each phase begins (s)."""
    source, begin, starts, lines = random.Random(seed), 0.0, [], []
    for number, phase in enumerate(phases):
        starts.append(begin)
        at = begin
        while (at := at + source.expovariate(phase.rate * engines)) < begin + phase.seconds:
            context = source.randrange(phase.contexts * engines) if phase.contexts else 0
            first = (number * 1000 + context) * 100
            new = max(8, round(source.lognormvariate(0, PROMPT_SIGMA) * phase.new))
            lines.append(
                {
                    "timestamp": at * 1e3,
                    "input_length": phase.blocks * BLOCK + new,
                    "output_length": max(
                        8, round(source.lognormvariate(0, ANSWER_SIGMA) * phase.answer)
                    ),
                    "hash_ids": list(range(first, first + phase.blocks)),
                }
            )
        begin += phase.seconds + PAUSE_S
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return starts


def run(
    bound: Bound,
    trace: Path,
    starts: Sequence[float],
    phases: Sequence[Phase],
    engines: int,
    prefill: int,
) -> Figures:
    """Return the seconds that each request took, by its phase and over all."""
    decode = engines - prefill if prefill else 0
    fleet = read_fleet(f"{engines}x{PROFILE}", prefill=prefill, decode=decode)
    outcome = run_experiment(Experiment(bound, tuple(fleet), WorkloadConfig(name=str(trace))))
    took: Figures = {phase.name: [] for phase in phases}
    first = json.loads(trace.open().readline())["timestamp"] / 1e3  # a trace begins with it
    for record in outcome.records:
        assert record.ok, record.error
        number = sum(start <= record.at_s + first for start in starts) - 1
        took[phases[number].name].append(record.end_s)
    return {**took, "all": list(itertools.chain(*took.values()))}


def means(
    engines: int,
    prefill: int,
    phases: Sequence[Phase],
    seed: int,
    strategies: Iterable[str] = tuple(STRATEGIES),
) -> dict[str, dict[str, float]]:
    """Return the mean seconds of each strategy in each phase; `prefill` engines only prefill.

    With `prefill`, the others only decode.
    """
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "changing.jsonl"
        starts = write_trace(trace, phases, engines, seed)
        return {
            name: {
                phase: statistics.fmean(took)
                for phase, took in run(
                    STRATEGIES[name], trace, starts, phases, engines, prefill
                ).items()
            }
            for name in strategies
        }


def main() -> None:
    only_save(__doc__ or "")
    results: dict[str, Any] = {}
    columns = [*(phase.name for phase in PHASES), "all"]
    for fleet, (engines, prefill) in FLEETS.items():
        seeds = {seed: means(engines, prefill, PHASES, seed) for seed in SEEDS}
        results[fleet] = seeds
        median = {
            name: {
                column: statistics.median(found[name][column] for found in seeds.values())
                for column in columns
            }
            for name in STRATEGIES
        }
        rows = [[name, *(f"{median[name][c]:.2f}" for c in columns)] for name in STRATEGIES]
        best = {
            c: [
                found[ADAPTIVE][c] / min(found[name][c] for name in STRATEGIES if name != ADAPTIVE)
                for found in seeds.values()
            ]
            for c in columns
        }
        rows.append(
            ["adaptive / best other", *(f"{min(best[c]):.2f}-{max(best[c]):.2f}" for c in columns)]
        )
        table(f"{fleet}: mean s to the whole answer, medians of seeds", ["", *columns], rows)
    publish("changing_traffic", {"profile": PROFILE, "fleets": results})


if __name__ == "__main__":
    main()
