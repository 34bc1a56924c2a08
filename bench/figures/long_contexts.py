"""Infinite-LLM, Figures 8 and 10: requests longer than an instance's pool, in virtual time.

Instances borrow pages of each other, as engines with `--borrow` and `--lend-share`. The paper's
baseline (vLLM-v2) is one instance with all GPUs.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from bench.figures.claims import Answer, Claim, Part, Verdict, by_effect, by_places
from engine.latency import MODELS, FittedLatency, Profile, find_profile
from engine.protocol import EngineConfig
from engine.virtual import BorrowingSettings
from router.simulation import CONFIG, Experiment, Outcome, SimulatedEngine, run_experiment
from router.simulation.fleet import VirtualFleet
from router.workload import WorkloadConfig
from strategies.data_parallel import data_parallel

__all__ = ["figure_8", "figure_10"]

COARSE = 8  # tokens of a context that one token of the simulation stands for
PAGE = 128  # tokens of the simulation: a block, which is lent, is one page
OUTPUT = 500  # tokens, each with the room of `COARSE`; the paper does not say how many
BUDGET = 8192 // COARSE  # tokens of prompts in a step
SHARE = 0.95  # of a pool that may be lent: twice the normal range fits two pools
SLACK = 1.05  # of a pool over the normal range: the output, and a block to compute in
PEAK = 312e12 / 3  # FLOP/s of attention on one A100: a third of its peak, as in other profiles
# A loan is called back as a whole, and a creditor has 512 at most. Few looks at the accounts save
# time of the simulation; whoever wants a block wakes the keeper anyway.
BORROWING = BorrowingSettings(tick_s=0.5, blocks=4)
FOREVER = 1e6  # s; requests wait as long as it takes
HEARTBEAT_S = 4.0  # the ledger is as old; a step takes up to some seconds
SEED = 0
ARMS = ("one instance", "no borrowing", "borrowing", "borrowing, DGFM")


@dataclass(frozen=True, slots=True)
class Setting:
    """A row of the paper's Table 2, with our profiles."""

    name: str
    instances: int
    small: str  # profile of an instance
    large: str  # profile of the baseline's one instance
    normal: int  # tokens of the longest normal request
    long: int  # tokens of the longest long one


OPT_13B = Setting("13B, 4 GPUs", 2, "opt-13b@a100:tp2", "opt-13b@a100:tp4", 140_000, 280_000)
FOUR_13B = Setting("four 13B tp2", 4, "opt-13b@a100:tp2", "", 140_000, 480_000)
# Of long requests: the paper's gain, and how many requests are run.
RATIOS = {0.01: (1.4, 2.4, 60), 0.1: (1.1, 1.4, 20), 0.3: (1.03, 1.3, 20)}
# Requests per second, more than any arm serves.
RATES = {0.01: 0.1, 0.1: 0.07, 0.3: 0.05}
MANY = 0.05  # of long requests: more than that set the throughput
WHY_NO_GAIN = (
    "By DistServe's coefficients one instance of four GPUs computes prompts 1.8 times as fast as "
    "one of two, so two instances gain 11 % at most. If the paper's baseline loses more to "
    "communication between its GPUs, these coefficients do not show it.",
    "A long request fills most of both pools, and of the two instances only its own computes, but "
    "for attention over lent blocks. Of the one large instance all GPUs compute.",
)
OVER_TIME = (0.3, 40, 0.05)  # of Figure 10: ratio, requests, rate


@dataclass(frozen=True, slots=True)
class Run:
    """What came of one arm."""

    completed: int
    refused: int
    seconds: float
    output_per_s: float  # tokens of completed requests
    context_per_s: float  # tokens of prompts and outputs of completed requests
    moved: int  # blocks
    home: dict[str, int]  # blocks that came home, by cause
    lost: int  # blocks that were computed again
    halves: tuple[float, float]  # context tokens per second while requests arrive


@cache
def coarse(name: str) -> Profile:
    """Return a profile whose tokens stand for `COARSE` ones each, so that a run is shorter.

    Costs per token of a prompt or a context grow by that factor, and squares by its square. What a
    decode costs beside its context stays. Attention among the tokens of prompts takes a third of
    the device's peak, as in the profiles of splitwise-sim's times: DistServe's coefficients are
    fitted to prompts of up to 2048 tokens, and their squares contradict each other beyond.
    """
    profile, k = find_profile(name), COARSE
    if not isinstance(profile.step, FittedLatency):
        raise TypeError(name)
    shape, (own, token, _) = MODELS[profile.model], profile.step.prefill
    square = 2e3 * shape.hidden * shape.layers / (PEAK * profile.gpus)
    step = replace(
        profile.step,
        prefill=(own, token * k, square * k * k),
        decode=_scaled(profile.step.decode),
        large_decode=_scaled(profile.step.large_decode),
    )
    return replace(
        profile, step=step, kv_bytes_per_token=profile.kv_bytes_per_token * k,
        pool_tokens=profile.pool_tokens // k,
    )  # fmt: skip


def run(
    setting: Setting, arm: str, ratio: float, requests: int, rate: float, *, seed: int = SEED,
) -> Run:  # fmt: skip
    """Run one arm under `requests` Poisson arrivals at `rate` requests per second."""
    one = coarse(setting.small)
    pool = int(setting.normal * SLACK) // COARSE // PAGE
    count, flags = setting.instances, dict[str, Any]()
    if arm == "one instance":
        # All GPUs hold one copy of the weights: the pool is larger by what the profiles say.
        larger = coarse(setting.large).pool_tokens / one.pool_tokens
        pool, one, count = int(pool * larger), coarse(setting.large), 1
    elif arm != "no borrowing":
        flags = {"borrow": True, "lend_share": SHARE}
    fleet = tuple(
        SimulatedEngine(
            EngineConfig(
                engine_id=f"engine-{number}", pool_pages=pool, page_size=PAGE,
                token_budget=BUDGET, decode_slowdown=0.0, max_model_len=1 << 20,
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
    watched: list[VirtualFleet] = []
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.csv"
        _write(trace, setting, ratio, requests, rate, seed)
        outcome = run_experiment(
            Experiment(
                data_parallel.bind({}), fleet, WorkloadConfig(name=str(trace), seed=seed),
                requests, config=config, borrowing=BORROWING,
            ),
            observe=watched.append,
        )  # fmt: skip
    return _summary(outcome, watched[0])


def figure_8() -> Part:
    """Throughput at saturation, with 1, 10 and 30 % of long requests."""
    data: dict[str, Any] = {"rows": []}
    claims = []
    for ratio, (low, high, requests) in RATIOS.items():
        rate = RATES[ratio]
        runs = {arm: run(OPT_13B, arm, ratio, requests, rate) for arm in ARMS[:3]}
        gain = runs["borrowing"].context_per_s / runs["one instance"].context_per_s
        answers = {OPT_13B.name: Answer(f"{gain:.2f}×", _within(low, high, gain))}
        data["rows"] += [_row(OPT_13B, ratio, arm, found) for arm, found in runs.items()]
        claims.append(
            Claim(
                "Figure 8", f"{ratio:.0%} long requests: throughput {low}–{high}× of one instance "
                "with all GPUs", answers,
                WHY_NO_GAIN[ratio > MANY],
            )
        )  # fmt: skip
    refused = [row["refused"] for row in data["rows"] if row["arm"] == "borrowing"]
    claims.append(
        Claim(
            "Figure 7", "contexts longer than an instance's pool are served",
            {OPT_13B.name: Answer(f"{sum(refused)} requests are refused",
                                  by_places(each == 0 for each in refused))},
            "With all ratios, up to twice the normal range.",
        )
    )  # fmt: skip
    return Part(data, claims)


def figure_10() -> Part:
    """Throughput over time of four instances that borrow, with and without DGFM."""
    ratio, requests, rate = OVER_TIME
    runs = {arm: run(FOUR_13B, arm, ratio, requests, rate) for arm in ARMS[2:]}
    plain, swapped = runs["borrowing"], runs["borrowing, DGFM"]
    gain = swapped.context_per_s / plain.context_per_s - 1
    trend = plain.halves[1] / plain.halves[0] - 1
    home = swapped.home.get("swap", 0)
    claims = [
        Claim(
            "Figure 10", "with DGFM, throughput stays above that without",
            {"four 13B tp2": Answer(f"{gain:+.1%}, {home} blocks swapped home",
                                    "in direction" if gain > 0.02 else "not reproduced")},
            "Throughput over the whole run, with 30 % long requests, until the last one is done.",
        ),
        Claim(
            "Figure 10", "without DGFM, throughput falls over time",
            {"four 13B tp2": Answer(f"{trend:+.1%}", by_effect(-1.0, trend))},
            "The second half of the time in which requests arrive against the first one.",
        ),
    ]  # fmt: skip
    rows = [_row(FOUR_13B, ratio, arm, found) for arm, found in runs.items()]
    return Part({"rows": rows}, claims)


def _scaled(coefficients: tuple[float, float, float]) -> tuple[float, float, float]:
    own, token, sequence = coefficients
    return own, token * COARSE, sequence


def _write(
    path: Path, setting: Setting, ratio: float, requests: int, rate: float, seed: int
) -> None:
    """Write a trace: lengths are uniform in their range, and long requests evenly spread."""
    random = Random(f"{setting.name} {ratio} {seed}")
    lines, at = ["TIMESTAMP,ContextTokens,GeneratedTokens"], 0.0
    for number in range(requests):
        long = int((number + 0.5) * ratio + 0.5) > int((number - 0.5) * ratio + 0.5)
        low, high = (setting.normal, setting.long) if long else (COARSE, setting.normal)
        tokens = max(random.randint(low, high) // COARSE - OUTPUT, 1)
        minutes, seconds = divmod(at, 60)
        hours, minutes = divmod(int(minutes), 60)
        lines.append(f"2023-01-01 {hours:02}:{minutes:02}:{seconds:09.6f},{tokens},{OUTPUT}")
        at += random.expovariate(rate)
    path.write_text("\n".join(lines) + "\n")


def _summary(outcome: Outcome, fleet: VirtualFleet) -> Run:
    good = [record for record in outcome.records if record.ok]
    context = [
        (record.at_s + record.end_s, record.input_tokens + record.output_tokens) for record in good
    ]
    last = outcome.records[-1].at_s
    halves = [
        COARSE * sum(tokens for at, tokens in context if low <= at < high) / (high - low)
        for low, high in ((0.0, last / 2), (last / 2, last))
    ]
    engines = [calls.engine for calls in fleet.engines.values()]
    home: Counter[str] = Counter()
    for engine in engines:
        home.update(engine.cache.elsewhere.home if engine.cache.elsewhere is not None else {})
    stats = [engine.steps.stepper.stats for engine in engines]
    return Run(
        completed=len(good),
        refused=len(outcome.records) - len(good),
        seconds=outcome.seconds,
        output_per_s=sum(record.output_tokens for record in good) / outcome.seconds,
        context_per_s=COARSE * sum(tokens for _, tokens in context) / outcome.seconds,
        moved=sum(each.moved_blocks for each in stats),
        home=dict(sorted(home.items())),
        lost=sum(each.lost_blocks for each in stats),
        halves=(halves[0], halves[1]),
    )


def _row(setting: Setting, ratio: float, arm: str, found: Run) -> dict[str, Any]:
    """Return a row of the page's table."""
    return {
        "setting": setting.name,
        "long": f"{ratio:.0%}",
        "arm": arm,
        "completed": found.completed,
        "refused": found.refused,
        "context tokens/s": found.context_per_s,
        "output tokens/s": found.output_per_s,
        "seconds": found.seconds,
        "blocks moved": found.moved,
        "home": sum(found.home.values()),
        "by swaps": found.home.get("swap", 0),
        "lost": found.lost,
    }


def _within(low: float, high: float, gain: float) -> Verdict:
    """Return the verdict on a factor for which the paper gives a range."""
    nearest = min(max(gain, low), high)
    return by_effect(nearest - 1, gain - 1)
