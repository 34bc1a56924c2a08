"""`adaptive`: its policy, and how it does under traffic that changes, on virtual engines."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from virtual_deployment import VirtualDeployment, virtual_deployment
from virtual_time import in_virtual_time

from bench.changing_traffic import ADAPTIVE, PHASES, means
from engine.latency import FittedLatency, Profile, PutLatency
from strategies.adaptive import FORGET, LEAVE, Traffic, adaptive

REUSE, BUSY, LONG, WINDOW = 0.3, 0.35, 768, 24


def chosen(traffic: Traffic, *roles: str) -> str:
    engines = [SimpleNamespace(role=role) for role in roles or ("any", "any")]
    cluster: Any = SimpleNamespace(engines=engines)
    return traffic.choose(cluster, REUSE, BUSY)[0].name


def steady(traffic: Traffic, every: float, tokens: int, cached: float = 0.0, count: int = 200):
    """Note requests with so many long tokens at a fixed pace."""
    begin = 0.0 if traffic._last is None else traffic._last
    for number in range(1, count + 1):
        traffic.note_request(begin + number * every, cached, tokens, WINDOW)


def test_the_load_is_the_share_of_the_engines_time():
    traffic = Traffic()
    assert traffic.load(1) == 0.0
    traffic.note_first_token(0.5, 1000)
    steady(traffic, every=0.25, tokens=1000)
    assert traffic.load(4) == pytest.approx(4 * 0.5 / 4, rel=0.01)
    assert traffic.load(8) == pytest.approx(traffic.load(4) / 2)
    steady(traffic, every=0.25, tokens=0)
    assert traffic.load(4) < 0.01


def test_requests_at_once_are_no_load_without_bounds():
    """At first as after a second without any."""
    traffic = Traffic()
    traffic.note_first_token(1.0, 10_000)
    for _ in range(3):
        traffic.note_request(5.0, 0.0, 1000, WINDOW)
    assert traffic.load(1) == pytest.approx(0.3, rel=0.1)
    traffic.note_request(5.0, 0.0, 1000, 1)
    assert traffic.load(1) == 0.0  # a window of one request has no time


def test_the_fastest_prompt_counts_until_it_is_forgotten():
    traffic = Traffic()
    for seconds in (2.0, 0.5, 3.0):
        traffic.note_first_token(seconds, 1000)
    steady(traffic, every=1.0, tokens=1000)
    assert traffic.load(1) == pytest.approx(0.5 * FORGET, rel=0.01)
    for _ in range(10_000):
        traffic.note_first_token(3.0, 1000)
    assert traffic.load(1) == pytest.approx(3.0, rel=0.01)


def test_a_state_is_entered_at_its_threshold_and_left_below_it():
    traffic = Traffic()
    traffic.note_first_token(1.0, 1000)
    steady(traffic, every=1 / (1.9 * BUSY), tokens=1000)
    assert chosen(traffic) == "data_parallel"
    steady(traffic, every=1 / (2.1 * BUSY), tokens=1000)
    assert chosen(traffic) == "prefill_decode"
    steady(traffic, every=1 / (2.1 * BUSY * LEAVE), tokens=1000)
    assert chosen(traffic) == "prefill_decode"
    steady(traffic, every=1 / (1.9 * BUSY * LEAVE), tokens=1000)
    assert chosen(traffic) == "data_parallel"


def test_reuse_comes_first_and_has_its_threshold_too():
    traffic = Traffic()
    traffic.note_first_token(1.0, 1000)
    steady(traffic, every=0.1, tokens=1000, cached=REUSE - 0.02)
    assert chosen(traffic) == "prefill_decode"
    steady(traffic, every=0.1, tokens=1000, cached=REUSE + 0.02)
    assert chosen(traffic) == "cache_aware"
    steady(traffic, every=0.1, tokens=1000, cached=REUSE * LEAVE + 0.02)
    assert chosen(traffic) == "cache_aware"
    steady(traffic, every=0.1, tokens=1000, cached=REUSE * LEAVE - 0.02)
    assert chosen(traffic) == "prefill_decode"


def test_roles_are_kept():
    traffic = Traffic()
    assert chosen(traffic, "prefill", "decode") == "balanced"
    steady(traffic, every=1.0, tokens=0, cached=0.9)
    assert chosen(traffic, "prefill", "decode") == "cache_aware"


# On virtual engines

PROFILE = Profile(
    name="made-up", model="made-up", device="none", gpus=0, source="made up", layers=4,
    kv_bytes_per_token=1000, context_length=8192, pool_tokens=1 << 16,
    step=FittedLatency((10.0, 0.05, 0.0), (10.0, 0.0, 0.02), (10.0, 0.0, 0.02)),
    put=PutLatency(1e9, 1e-5),
)  # fmt: skip


async def delegates(
    deployment: VirtualDeployment, count: int, tokens: int, every: float, salt: int
) -> list[str]:
    """Send prompts with nothing in common at a fixed pace; return what served each of them."""
    served: list[str] = [""] * count

    async def one(number: int) -> None:
        prompt = [(salt * 7919 + number * 131 + i * (1 + number)) % 900 + 1 for i in range(tokens)]
        got, receipt = await deployment.complete(prompt, 8)
        assert len(got) == 8 and not receipt.retries
        (served[number],) = receipt.delegates

    async with asyncio.TaskGroup() as tasks:
        for number in range(count):
            tasks.create_task(one(number))
            await asyncio.sleep(every)
    return served


@pytest.mark.parametrize("engines", [1, 4])
@in_virtual_time
async def test_it_follows_the_lengths_of_prompts(engines):
    fleet = {f"engine-{number}": ("any", PROFILE) for number in range(engines)}
    async with virtual_deployment(fleet, adaptive) as deployment:
        # 1500 tokens take 0.11 s: three steps of 10 ms, and 0.05 ms for each token.
        short = await delegates(deployment, 40, 100, 0.05, salt=1)
        long = await delegates(deployment, 60, 1500, 0.2 / engines, salt=2)
        seldom = await delegates(deployment, 60, 1500, 2.0 / engines, salt=3)
        await deployment.check_at_rest()
    assert set(short) == {"data_parallel"}
    assert long[0] == "data_parallel" and set(long[40:]) == {"prefill_decode"}
    assert seldom[0] == "prefill_decode" and set(seldom[40:]) == {"data_parallel"}
    for served in (long, seldom):
        assert sum(one != other for one, other in itertools.pairwise(served)) == 1


@in_virtual_time
async def test_it_follows_a_common_prefix():
    fleet = {f"engine-{number}": ("any", PROFILE) for number in range(4)}
    context = [(i * i * 3 + i) % 900 + 1 for i in range(640)]
    async with virtual_deployment(fleet, adaptive) as deployment:
        served = []
        for number in range(40):
            _, receipt = await deployment.complete([*context, *[number + 1] * 40], 8)
            served += receipt.delegates
            await asyncio.sleep(0.2)
        await deployment.check_at_rest()
    changes = served.index("cache_aware")
    assert served == ["data_parallel"] * changes + ["cache_aware"] * (40 - changes)
    assert 4 < changes < WINDOW


class Counting(Traffic):
    """Keeps what is noted."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[tuple[Any, ...]] = []

    def note_request(self, *request: Any) -> None:
        self.noted.append(request[1:])

    def note_first_token(self, *first: Any) -> None:
        self.noted.append(first[1:])


async def noted_of(tokens: int, *, dies_after: list[int]) -> list[tuple[Any, ...]]:
    """Return what is noted of one prompt whose engine may die."""
    fleet = {f"engine-{number}": ("any", PROFILE) for number in range(3)}
    traffic = Counting()
    async with virtual_deployment(fleet, adaptive, most_at_once=1) as deployment:
        deployment.revision.states[(adaptive,), Traffic] = traffic
        deployment.fleet.dies_after = dies_after
        got, receipt = await deployment.complete([1] * tokens, 8)
        assert len(got) == 8 and len(receipt.retries) == (not deployment.fleet.dies_after)
    return traffic.noted


@in_virtual_time
async def test_a_request_that_is_tried_again_counts_once():
    assert await noted_of(100, dies_after=[3]) == [(0.0, 0, WINDOW)]


@in_virtual_time
async def test_a_long_prompt_is_noted_when_it_comes_and_at_its_first_token():
    assert await noted_of(1500, dies_after=[1000]) == [(0.0, 1500, WINDOW), (1500,)]


SECONDS = (15, 25, 20)  # of the phases
OTHERS = ("data_parallel", "cache_aware")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prefill", "separate"),
    [(0, "prefill_decode"), pytest.param(2, "balanced, auto", marks=pytest.mark.thorough)],
)
def test_it_is_about_as_good_as_the_best_of_each_phase_and_better_over_all(prefill, separate):
    phases = [
        replace(phase, seconds=seconds) for phase, seconds in zip(PHASES, SECONDS, strict=True)
    ]
    found = means(4, prefill, phases, 1, (*OTHERS, separate, ADAPTIVE))
    own = found.pop(ADAPTIVE)
    best = {phase: min(each[phase] for each in found.values()) for phase in own}
    ratios = {phase: own[phase] / best[phase] for phase in own}
    print(found, own, ratios)
    assert ratios.pop("all") < 1.0, found
    assert max(ratios.values()) < 1.15, ratios
