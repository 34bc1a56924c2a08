"""Runs of Infinite-LLM's mixed short and long requests, in virtual time, and what took their time.

A run is one arm: one instance with all GPUs, or several that refuse what exceeds their pool, borrow
pages of each other, or borrow and have the router's orders to swap (DGFM).
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from bench.figures.long_settings import PAGE, SMALL, Setting, coarse, write_trace
from engine.protocol import EngineConfig
from engine.scheduling import Generation
from engine.virtual import BorrowingSettings, Row
from router.simulation import CONFIG, Experiment, Outcome, SimulatedEngine, run_experiment
from router.simulation.fleet import VirtualFleet
from router.workload import WorkloadConfig
from strategies.data_parallel import data_parallel

__all__ = ["ARMS", "Run", "run"]

BUDGET = 8192  # tokens of prompts in a step
SHARE = 0.95  # of a pool that may be lent: twice the normal range fits two pools
# A loan is called back as a whole, and a creditor has 512 at most. Few looks at the accounts save
# time of the simulation; whoever wants a block wakes the keeper anyway.
BORROWING = BorrowingSettings(tick_s=0.5, blocks=4)
FOREVER = 1e6  # s; requests wait as long as it takes
HEARTBEAT_S = 4.0  # the ledger is as old; a step takes up to some seconds
MOST = 0.9  # of the requests; after that instances have less and less to do
ARMS = ("one instance", "no borrowing", "borrowing", "borrowing, DGFM")
Spans = list[tuple[float, float]]  # sorted, and apart from each other


@dataclass(frozen=True, slots=True)
class Run:
    """What came of one arm. Shares are of the time of all instances."""

    beyond: int  # requests longer than a pool of the small instances
    completed: int
    refused: int
    seconds: float
    output_per_s: float  # tokens of completed requests
    context_per_s: float  # tokens of prompts and outputs of completed requests
    moved: int  # blocks
    home: dict[str, int]  # blocks that came home, by cause
    lost: int  # blocks that were computed again
    preempted: int
    again: float  # tokens of prompts that were computed beyond those that completed
    pool: float  # share of the pools in use
    long: float  # share in steps with a request beyond a pool
    other: float  # share in other steps
    waits: float  # share without a step while the instance has requests
    shut: float  # share without a request while requests wait at the router
    lent: float  # share in attention for other instances; it may fall into any of these
    halves: tuple[float, float]  # context tokens per second, until `MOST` requests have ended

    @property
    def idle(self) -> float:
        """Share without a request while none waits at the router."""
        return 1 - self.long - self.other - self.waits - self.shut


@cache
def run(setting: Setting, arm: str, ratio: float, requests: int, rate: float, seed: int) -> Run:
    """Run one arm under `requests` Poisson arrivals at `rate` requests per second."""
    one, pool = coarse(SMALL, setting.coarse), setting.pool_pages
    count, flags = setting.instances, dict[str, Any]()
    if arm == "one instance":
        # All GPUs hold one copy of the weights: the pool is larger by what the profiles say.
        large = coarse(setting.large, setting.coarse)
        pool, one, count = int(pool * large.pool_tokens / one.pool_tokens), large, 1
    elif arm != "no borrowing":
        flags = {"borrow": True, "lend_share": SHARE}
    fleet = tuple(
        SimulatedEngine(
            EngineConfig(
                engine_id=f"engine-{number}", pool_pages=pool, page_size=PAGE,
                token_budget=BUDGET // setting.coarse, decode_slowdown=0.0, max_model_len=1 << 20,
                max_waiting=100_000, **flags,
            ),
            one,
        )
        for number in range(count)
    )  # fmt: skip
    config = replace(
        CONFIG, health_interval_s=HEARTBEAT_S, request_timeout_s=FOREVER,
        queue_timeout_s=FOREVER, max_queue=100_000,
        swap_blocks=1 if arm == "borrowing, DGFM" else 0,
    )  # fmt: skip
    watch = _Watch(setting)
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.csv"
        beyond = write_trace(trace, setting, ratio, requests, rate, seed)
        outcome = run_experiment(
            Experiment(
                data_parallel.bind({}), fleet, WorkloadConfig(name=str(trace), seed=seed),
                requests, config=config, borrowing=BORROWING,
            ),
            observe=watch.observe, keep_legs=True,
        )  # fmt: skip
    found = _summary(outcome, watch, beyond)
    _check(found, arm)
    return found


def _check(found: Run, arm: str) -> None:
    """Raise `ValueError` if an arm has not done what its name says."""
    if not found.beyond:
        raise ValueError("no request is longer than a pool")
    if arm == "no borrowing" and found.refused != found.beyond:
        raise ValueError(f"{found.refused} of {found.beyond} requests beyond a pool were refused")
    if bool(found.moved) != arm.startswith("borrowing"):
        raise ValueError(f"{arm}: {found.moved} blocks were moved")


class _Watch:
    """Adds up the time of steps."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.fleet: VirtualFleet | None = None
        self.steps: Counter[bool] = Counter()  # seconds, by whether a request is beyond a pool

    def observe(self, fleet: VirtualFleet) -> None:
        self.fleet = fleet
        for calls in fleet.engines.values():
            calls.engine.steps.on_steps = self._add

    def _add(self, row: Row, count: int) -> None:
        pool = self.setting.pool
        beyond = any(
            isinstance(job, Generation) and job.prompt_len + job.sampling.max_tokens > pool
            for job, _ in row.step.plan
        )
        self.steps[beyond] += row.seconds(count)


def _summary(outcome: Outcome, watch: _Watch, beyond: int) -> Run:
    if watch.fleet is None:
        raise ValueError("the run was not observed")
    good, scale = [record for record in outcome.records if record.ok], watch.setting.coarse
    context = [
        (record.at_s + record.end_s, record.input_tokens + record.output_tokens) for record in good
    ]
    until = sorted(at for at, _ in context)[int(MOST * (len(context) - 1))]
    halves = [
        scale * sum(tokens for at, tokens in context if low < at <= high) / (high - low)
        for low, high in ((0.0, until / 2), (until / 2, until))
    ]
    engines = [calls.engine for calls in watch.fleet.engines.values()]
    home: Counter[str] = Counter()
    for engine in engines:
        home.update(engine.cache.elsewhere.home if engine.cache.elsewhere is not None else {})
    stats = [engine.steps.stepper.stats for engine in engines]
    needed = sum(record.input_tokens for record in good)
    waits, shut = _without_steps(outcome)
    all_s = outcome.seconds * len(engines)
    return Run(
        beyond=beyond,
        completed=len(good),
        refused=len(outcome.records) - len(good),
        seconds=outcome.seconds,
        output_per_s=sum(record.output_tokens for record in good) / outcome.seconds,
        context_per_s=scale * sum(tokens for _, tokens in context) / outcome.seconds,
        moved=sum(each.moved_blocks for each in stats),
        home=dict(sorted(home.items())),
        lost=sum(each.lost_blocks for each in stats),
        preempted=sum(engine.scheduler.preemptions for engine in engines),
        again=sum(each.prompt_tokens for each in stats) / needed - 1,
        pool=sum(each.kv_mean for each in outcome.engines) / len(engines),
        long=watch.steps[True] / all_s,
        other=watch.steps[False] / all_s,
        waits=waits / all_s,
        shut=shut / all_s,
        lent=sum(engine.compute.lent_s for engine in engines) / all_s,
        halves=(halves[0], halves[1]),
    )


def _without_steps(outcome: Outcome) -> tuple[float, float]:
    """Return seconds in which instances compute no step, although there are requests.

    First those in which requests are at the instance, then those in which none is there and
    some wait at the router.
    """
    legs: dict[str, Spans] = {use.id: [] for use in outcome.engines}
    at_router: Spans = []
    for record in outcome.records:
        own = [
            (record.at_s + leg.start_ms / 1e3, record.at_s + (leg.start_ms + (leg.ms or 0)) / 1e3)
            for leg in record.legs
        ]
        for leg, span in zip(record.legs, own, strict=True):
            legs[leg.engine].append(span)
        at_router += _gaps(_united(own), record.at_s, record.at_s + record.end_s)
    waiting = _united(at_router)
    waits = shut = 0.0
    for use in outcome.engines:
        there = _united(legs[use.id])
        waits += _length(there) - use.busy_s
        empty = _gaps(there, 0.0, outcome.seconds)
        shut += _length(empty) + _length(waiting) - _length(_united([*empty, *waiting]))
    return waits, shut


def _united(spans: Sequence[tuple[float, float]]) -> Spans:
    found: Spans = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def _gaps(spans: Spans, begin: float, end: float) -> Spans:
    edges = [begin, *(edge for span in spans for edge in span), end]
    return [(low, high) for low, high in zip(edges[::2], edges[1::2], strict=True) if high > low]


def _length(spans: Spans) -> float:
    return sum(end - begin for begin, end in spans)
