"""Strategies on virtual engines, at a rate, over several seeds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from router.simulation import Experiment, read_fleet, run_experiment, summarize
from router.strategy import Bound
from router.telemetry import Slo
from router.workload import WorkloadConfig
from strategies.balanced import balanced
from strategies.data_parallel import data_parallel
from strategies.prefill_decode import prefill_decode

__all__ = [
    "ARMS",
    "CHUNKS",
    "OURS",
    "PAPER",
    "PROFILE",
    "Arm",
    "Pattern",
    "Point",
    "Size",
    "Sweep",
    "balance",
    "data_parallel_pair",
    "one_prefill",
    "run",
    "sweep",
]

PROFILE = "llama-3.1-8b@a100"
TIMES = ("ttft", "tpot", "jct")


@dataclass(frozen=True, slots=True)
class Arm:
    """How all engines of a run schedule: flags of an engine."""

    name: str
    flags: Mapping[str, Any] = field(default_factory=dict)


# Whole prompts in one step, beside the decodes and without a limit to how long these then take.
PAPER = Arm("paper's engine", {"token_budget": 8192, "decode_slowdown": 0.0})
CHUNKS = Arm("chunks of 512", {"decode_slowdown": 0.0})
OURS = Arm("our default")
ARMS = (PAPER, CHUNKS, OURS)


@dataclass(frozen=True, slots=True)
class Size:
    """How much is run of each point."""

    requests: int
    seeds: int


@dataclass(frozen=True, slots=True)
class Pattern:
    """A strategy and the engines it runs on."""

    name: str
    bound: Bound
    engines: int
    prefill: int = 0  # engines with that role; the others decode, if there are any with it


data_parallel_pair = Pattern("data parallel", data_parallel.bind({}), 2)


def one_prefill(decodes: int) -> Pattern:
    """Return prefill-decode disaggregation with one prefill engine."""
    return Pattern(f"1P{decodes}D", prefill_decode.bind({}), 1 + decodes, 1)


def balance(ratio: float | str, name: str = "") -> Pattern:
    """Return balanced disaggregation on one prefill and one decode engine."""
    return Pattern(name or f"ratio {ratio}", balanced.bind({"ratio": ratio}), 2, 1)


@dataclass(frozen=True, slots=True)
class Point:
    """Times of one pattern at one rate, in milliseconds: means over the seeds."""

    pattern: str
    arm: str
    rate: float  # requests per second and engine
    mean: dict[str, float]  # by `TIMES`
    p99: dict[str, float]
    busy: list[float]  # share of the time that each engine computes
    seeds: dict[str, list[float]]  # mean and P99 of JCT for each seed


def run(
    pattern: Pattern, arm: Arm, workload: WorkloadConfig, rate: float, requests: int,
    seeds: Iterable[int],
) -> Point:  # fmt: skip
    """Run a pattern at `rate` requests per second and engine. All requests must complete."""
    decode = pattern.engines - pattern.prefill if pattern.prefill else 0
    fleet = read_fleet(
        f"{pattern.engines}x{PROFILE}", prefill=pattern.prefill, decode=decode, flags=arm.flags
    )
    found = []
    for seed in seeds:
        config = replace(workload, rate=rate * pattern.engines, seed=seed)
        figures = summarize(
            run_experiment(Experiment(pattern.bound, fleet, config, requests)), Slo()
        )
        assert figures["completed"] == requests, figures["error_messages"]
        found.append(figures)
    jct = [each["jct_ms"] for each in found]
    return Point(
        pattern.name, arm.name, rate,
        {time: fmean(each[f"{time}_ms"]["mean"] for each in found) for time in TIMES},
        {time: fmean(each[f"{time}_ms"]["p99"] for each in found) for time in TIMES},
        [fmean(shares) for shares in zip(*map(_busy, found), strict=True)],
        {"mean": [each["mean"] for each in jct], "p99": [each["p99"] for each in jct]},
    )  # fmt: skip


def _busy(figures: Mapping[str, Any]) -> list[float]:
    return [engine["utilisation"] for engine in figures["engines"]]


@dataclass(frozen=True, slots=True)
class Sweep:
    """Patterns at several rates, under one arm. All get the same requests at a rate and seed."""

    points: dict[str, dict[float, Point]]  # by pattern and rate

    def ratios(
        self, pattern: str, to: str, kind: str = "mean", time: str = "jct"
    ) -> dict[float, float]:
        """Return a pattern's time over that of another one, at each rate."""
        return {
            rate: getattr(point, kind)[time] / getattr(self.points[to][rate], kind)[time]
            for rate, point in self.points[pattern].items()
        }


def sweep(
    patterns: Sequence[Pattern], arm: Arm, workload: WorkloadConfig, rates: Sequence[float],
    size: Size,
) -> Sweep:  # fmt: skip
    """Run all patterns at all rates."""
    return Sweep(
        {
            pattern.name: {
                rate: run(pattern, arm, workload, rate, size.requests, range(size.seeds))
                for rate in rates
            }
            for pattern in patterns
        }
    )
