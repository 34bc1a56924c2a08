"""`balanced` with `ratio=auto` against fixed ratios: the strategy itself, on virtual engines.

The engines are the real scheduler and bookkeeping in virtual time, behind the router's own parts.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pytest
from virtual_deployment import VirtualDeployment, virtual_deployment
from virtual_time import in_virtual_time

from engine.latency import FittedLatency, Profile, PutLatency

pytestmark = pytest.mark.slow

STEP_MS, STREAM_MS, TOKEN_MS, BUDGET = 28.0, 3.5, 1.42, 512  # SmolLM2 in bfloat16 on a core
RATIOS = (0.0, 0.2, 0.4, 0.6)
COUNT, SEEDS = 80, range(3)
PAIR = (1, 1)


@dataclass(frozen=True)
class Job:
    """One request: when it comes, and its tokens of prompt and output."""

    at: float
    tokens: int
    output: int


@dataclass(frozen=True)
class Done:
    """One request's time in seconds, and the decode engine's share of its prompt."""

    seconds: float
    share: float


def profile(slower: float) -> Profile:
    """Return the profile of an engine that takes `slower` times as long."""
    prefill = (STEP_MS * slower, TOKEN_MS * slower, 0.0)
    decode = (STEP_MS * slower, 0.0, STREAM_MS * slower)
    return Profile(
        name="smollm2", model="smollm2", device="cpu", gpus=0, source="measured on a core",
        layers=30, kv_bytes_per_token=23_040, context_length=8192, pool_tokens=1 << 18,
        step=FittedLatency(prefill, decode, decode), put=PutLatency(2e9, 1e-5),
    )  # fmt: skip


def engines(
    prefills: int, decodes: int, slower: Iterable[float] = ()
) -> dict[str, tuple[str, Profile]]:
    roles = ["prefill"] * prefills + ["decode"] * decodes
    factors = [*slower, *[1.0] * len(roles)]
    return {
        f"{role}{number}": (role, profile(factor))
        for number, (role, factor) in enumerate(zip(roles, factors, strict=False))
    }


def run(
    ratio: float | str,
    jobs: list[Job],
    counts: tuple[int, int] = PAIR,
    slower: Iterable[float] = (),
    decode_slowdown: float = 0.0,
) -> list[Done]:
    """Run all jobs; return what became of each, in their order."""
    done: dict[int, Done] = {}
    source = random.Random(9)

    async def one(deployment: VirtualDeployment, number: int, job: Job) -> None:
        now = asyncio.get_running_loop().time
        # No two prompts share a page: nothing is cached.
        prompt = source.choices(range(10, 290), k=job.tokens)
        await asyncio.sleep(job.at)
        began = now()
        tokens, receipt = await deployment.complete(prompt, job.output)
        assert len(tokens) == job.output and not receipt.retries
        sent = sum(leg.sent_tokens for leg in receipt.legs)
        done[number] = Done(now() - began, (job.tokens - sent) / job.tokens)

    @in_virtual_time
    async def deploy() -> None:
        options = {
            "token_budget": BUDGET, "decode_slowdown": decode_slowdown, "max_batch": 256,
        }  # fmt: skip
        async with virtual_deployment(
            engines(*counts, slower), "balanced", options=options, ratio=ratio
        ) as deployment:
            async with asyncio.TaskGroup() as tasks:
                for number, job in enumerate(jobs):
                    tasks.create_task(one(deployment, number, job))
            await deployment.check_at_rest()

    deploy()
    return [done[number] for number in range(len(jobs))]


def poisson(seed: int, *, rate: float, tokens: int, output: int) -> list[Job]:
    source, at, jobs = random.Random(seed), 0.0, []
    for _ in range(COUNT):
        at += source.expovariate(rate)
        jobs.append(Job(at, tokens, output))
    return jobs


def mean_s(done: Iterable[Done]) -> float:
    return statistics.fmean(each.seconds for each in done)


BOUND = 1.07  # longer than the best fixed ratio by as much, at most
SETTINGS = {
    "little load": (PAIR, 384, 12, 0.6, ()),
    "more prefill than one engine can do": (PAIR, 384, 12, 1.8, ()),
    "almost only decoding": (PAIR, 26, 32, 7.0, ()),
    "long": (PAIR, 1000, 100, 0.6, ()),
    "two prefill engines": ((2, 1), 384, 12, 3.0, ()),
    "two decode engines": ((1, 2), 384, 12, 1.8, ()),  # best: they do most of the prefill
    "four engines": ((2, 2), 1000, 100, 1.5, ()),
    "a slow prefill engine": (PAIR, 384, 12, 0.8, (2.0, 1.0)),
    "a slow decode engine": (PAIR, 384, 12, 1.0, (1.0, 2.0)),
}


ALWAYS = ("little load", "long", "two decode engines", "a slow decode engine")


@pytest.mark.parametrize(
    "setting",
    [
        each if each in ALWAYS else pytest.param(each, marks=pytest.mark.thorough)
        for each in SETTINGS
    ],
)
def test_auto_is_about_as_good_as_the_best_fixed_ratio(setting):
    counts, tokens, output, rate, slower = SETTINGS[setting]
    arrivals = [poisson(seed, rate=rate, tokens=tokens, output=output) for seed in SEEDS]
    means = {
        ratio: statistics.fmean(mean_s(run(ratio, jobs, counts, slower)) for jobs in arrivals)
        for ratio in (*RATIOS, "auto")
    }
    assert means["auto"] < BOUND * min(means[ratio] for ratio in RATIOS), means


def phase(start: float, count: int, every: float, tokens: int, output: int) -> list[Job]:
    return [Job(start + n * every, tokens, output) for n in range(count)]


def parts(done: list[Done], size: int) -> Iterator[list[Done]]:
    return (done[n : n + size] for n in range(0, len(done), size))


def test_the_ratio_settles_after_a_step_and_does_not_oscillate():
    """Arrivals at a fixed pace: the load trebles and falls back, prompts shrink, outputs grow."""
    steps = [
        (40, 1.5, 384, 12), (40, 0.5, 384, 12), (40, 1.5, 384, 12), (40, 0.3, 26, 32),
        (40, 2.0, 1000, 12), (40, 2.0, 384, 200),
    ]  # fmt: skip
    jobs, at = [], 0.0
    for count, every, tokens, output in steps:
        jobs += phase(at, count, every, tokens, output)
        at += count * every
    settled = []
    for part in parts(run("auto", jobs), 40):
        late = [each.share for each in part[20:]]
        settled.append(statistics.fmean(late))
        assert max(late) - min(late) < 0.12, late
    assert settled[1] > 0.2  # at 2 requests a second one engine cannot prefill all
    assert settled[2] == pytest.approx(settled[0], abs=0.05)  # as in the first phase
    assert settled[3] < 0.05
    assert settled[4] > 0.3
    assert settled[5] < 0.05  # many streams run: their engine gets little prefill


def test_auto_is_about_as_good_as_the_best_ratio_of_each_phase():
    """Measurements of one workload do not spoil the division of the next."""
    phases = [(1.8, 384, 12), (7.0, 26, 32), (0.5, 1000, 100), (1.8, 384, 12)]
    alone = [
        poisson(seed, rate=rate, tokens=tokens, output=output)
        for seed, (rate, tokens, output) in enumerate(phases)
    ]
    jobs: list[Job] = []
    for part in alone:
        start = jobs[-1].at + 20 if jobs else 0.0
        jobs += [Job(start + job.at, job.tokens, job.output) for job in part]
    for part, done in zip(alone, parts(run("auto", jobs), COUNT), strict=True):
        best = min(mean_s(run(ratio, part)) for ratio in RATIOS)
        assert mean_s(done) < BOUND * best
