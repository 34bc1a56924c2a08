"""The steps of virtual engines: their times, and that skipping over them changes nothing."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from virtual_engines import STEP, Engines, events, generate
from virtual_time import in_virtual_time

from engine.latency import Factors, StepWork
from engine.virtual import output_tokens
from engine.virtual.steps import Row


def now() -> float:
    return asyncio.get_running_loop().time()


@in_virtual_time
async def test_a_request_takes_the_time_of_its_steps():
    engines = Engines("a", token_budget=512)
    prompt = [1 + i % 290 for i in range(700)]
    stream = await engines["a"].start_generate(generate("r", prompt, 21))
    first = await stream.next()
    chunks = [(0, 512), (512, 700)]
    prefill = sum(STEP.seconds(StepWork(b - a, b * b - a * a)) for a, b in chunks)
    assert now() == pytest.approx(prefill)
    rest = await events(stream)
    decodes = sum(STEP.seconds(StepWork(0, 0, 1, 700 + i)) for i in range(20))
    assert now() == pytest.approx(prefill + decodes)
    assert engines["a"].steps.busy_s == pytest.approx(now())
    tokens = first.token_ids + [token for event in rest for token in event.token_ids]
    assert tokens == output_tokens(prompt, 21)
    assert rest[-1].usage is not None and rest[-1].usage.completion_tokens == 21
    assert engines["a"].steps.stepper.stats.steps == 22
    await engines.rest()


SCATTER = (0.7, 0.9, 1.0, 1.1, 1.5, 3.0)


async def _history(most_at_once: int, **options: Any) -> list[tuple[str, float, float, int]]:
    """Run 60 requests at random times; return when each had its first and its last token."""
    engines = Engines("a", most_at_once=most_at_once, **options)
    source, times = random.Random(5), []

    async def ask(number: int, prompt: list[int], tokens: int) -> None:
        stream = await engines["a"].start_generate(
            generate(str(number), prompt, tokens, stream_tokens=1000)
        )
        first = await stream.next()
        begun = now()
        last = (await events(stream))[-1] if first.finish_reason is None else first
        assert last.usage is not None
        times.append((str(number), begun, now(), last.usage.cached_tokens))

    async with asyncio.TaskGroup() as tasks:
        for number in range(60):
            await asyncio.sleep(source.expovariate(6.0))
            shared = [1 + i % 290 for i in range(64)] if number % 3 else []
            own = [source.randrange(10, 290) for _ in range(source.randrange(1, 600))]
            tasks.create_task(ask(number, shared + own, source.randrange(1, 150)))
    await engines.rest()
    assert engines["a"].steps.busy_s <= now()
    return sorted(times)


@pytest.mark.parametrize(
    ("options", "tolerance_s"),
    [
        ({}, 1e-6),
        ({"max_batch": 3}, 1e-6),
        ({"pool_pages": 160}, 1e-6),  # pages of earlier requests are evicted, requests preempted
        ({"decode_slowdown": 1.5}, 1e-6),
        ({"decode_slowdown": 1.5, "scatter": SCATTER}, 1e-6),
    ],
    ids=str,
)
def test_steps_that_are_skipped_over_have_the_same_effect(options, tolerance_s):
    histories = []

    @in_virtual_time
    async def run(most_at_once: int) -> None:
        random.seed(3)  # of the scatter
        histories.append(await _history(most_at_once, **options))

    run(1)
    run(64)
    for (name, first, last, cached), other in zip(*histories, strict=True):
        near = [pytest.approx(at, abs=tolerance_s) for at in (first, last)]
        assert other == (name, *near, cached)


def test_after_a_preemption_the_lost_tokens_are_computed_in_one_step():
    seen: list[tuple[float, int]] = []

    @in_virtual_time
    async def run(most_at_once: int) -> None:
        engines = Engines("a", most_at_once=most_at_once, pool_pages=9, page_size=16)
        engine = engines["a"]
        first = await engine.start_generate(generate("first", [1] * 60, 60))
        second = await engine.start_generate(generate("second", [2] * 60, 70))
        await events(first)
        assert engine.scheduler.preemptions == 1  # for the ninth page
        await events(second)
        seen.append((now(), engine.steps.stepper.stats.steps))
        await engines.rest()

    run(1)
    run(64)
    (stepped_s, steps), (skipped_s, skipped) = seen
    assert skipped_s == pytest.approx(stepped_s) and skipped == steps


@in_virtual_time
async def test_whoever_looks_at_an_engine_sees_the_steps_that_have_ended():
    engines = Engines("a", most_at_once=64)
    prompt = [7] * 100
    stream = await engines["a"].start_generate(generate("r", prompt, 60, stream_tokens=60))
    await stream.next()
    for number in range(1, 5):
        await asyncio.sleep(10 * STEP.seconds(StepWork(0, 0, 1, 125)))
        engines["a"].state()
        generation = stream.generation
        assert abs(generation.generated - (1 + 10 * number)) <= 1
        assert engines["a"].cache.length(generation.seq_id) == 100 + generation.generated - 1
    assert engines["a"].state().running == 1
    stream.close()
    await engines.rest()


@in_virtual_time
async def test_a_request_that_comes_in_between_waits_for_the_step_under_way():
    engines = Engines("a", most_at_once=64)
    first = await engines["a"].start_generate(generate("1", [7] * 100, 60, stream_tokens=60))
    await first.next()
    step_s = STEP.seconds(StepWork(0, 0, 1, 105))
    began = now()
    await asyncio.sleep(5.5 * step_s)
    second = await engines["a"].start_generate(generate("2", [8] * 10, 2))
    await second.next()
    with_decode = STEP.seconds(StepWork(10, 100, 1, 106))
    assert now() - began == pytest.approx(6 * step_s + with_decode, rel=1e-2)
    second.close()
    first.close()
    await engines.rest()


@in_virtual_time
async def test_an_aborted_request_ends_after_the_step_under_way():
    engines = Engines("a", most_at_once=64)
    stream = await engines["a"].start_generate(generate("1", [7] * 100, 600, stream_tokens=600))
    await stream.next()
    await asyncio.sleep(0.05)
    busy = engines["a"].steps.busy_s
    stream.close()
    await asyncio.sleep(1)
    assert engines["a"].steps.busy_s - busy < 0.08
    assert engines["a"].state().pages.active == 0
    await engines.rest()


@pytest.mark.parametrize("factors", [None, Factors(SCATTER, 64)], ids=["even", "scattered"])
@pytest.mark.parametrize(("first_s", "growth_s"), [(0.01, 0.0), (0.01, 1e-5), (0.3, 0.2)])
def test_the_steps_that_have_ended_by_a_time(first_s, growth_s, factors):
    row = Row(None, [], 5.0, first_s, growth_s, 50, StepWork(), factors)  # type: ignore[arg-type]
    for steps, took in enumerate(row.durations(50)):
        end = 5.0 + row.seconds(steps)
        assert row.ended(end + 0.01 * took) == row.ended(end + 0.99 * took) == steps
    assert row.ended(1e9) == 50
