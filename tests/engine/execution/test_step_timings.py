"""The sample of an engine's own steps and puts: what is in it, and its bounds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from engine_helpers import generation
from stepper_machine import PROMPT, STEP_S, TOKEN_S, Machine, new_send

from engine.execution.step_timings import (
    EVERY,
    KINDS,
    LONGEST_S,
    PER_KIND,
    RECENT,
    SHORTEST_S,
    StepTimings,
    step_work,
)
from engine.latency import StepWork
from engine.scheduling import Chunk
from kvcache.types import SeqId


def test_a_step_is_noted_with_what_it_computed(new: Callable[..., Machine]):
    machine = new()
    machine.stepper.timings = timings = StepTimings()
    machine.stepper.submit(generation(1, PROMPT, max_tokens=2 * EVERY))
    for _ in range(4):
        machine.stepper.step()
    machine.stepper.submit(generation(2, [7] * 20, max_tokens=1))
    machine.run_until_idle()
    found = dict(timings.steps())
    # The prompt in two chunks, and the second one beside a decode.
    assert found[StepWork(64, 64**2)] == pytest.approx(STEP_S + 64 * TOKEN_S)
    assert found[StepWork(36, 100**2 - 64**2)] == pytest.approx(STEP_S + 36 * TOKEN_S)
    assert found[StepWork(20, 20**2, 1, 102)] == pytest.approx(STEP_S + 21 * TOKEN_S)
    alone = sorted(work for work in found if not work.prompt_tokens)
    assert [(work.decodes, work.context) for work in alone] == [(1, 105), (1, 113)]  # of 13


def test_the_last_token_of_a_prompt_alone_counts_as_a_decode():
    """Of what another engine has prefilled: one row and its context, as of a decode."""
    job, chunk = generation(1, [7] * 20), Chunk(SeqId(1), [7], sample=True)
    assert step_work([(job, chunk)], lambda _: 19) == StepWork(0, 0, 1, 19)
    inner = Chunk(SeqId(1), [7], sample=False)
    assert step_work([(job, inner)], lambda _: 18) == StepWork(1, 19**2 - 18**2)


def test_a_failed_step_is_not_noted(new: Callable[..., Machine], caplog: pytest.LogCaptureFixture):
    machine = new()
    machine.stepper.timings = timings = StepTimings()
    machine.failure = RuntimeError("boom")
    machine.stepper.submit(generation(1, PROMPT))
    machine.stepper.step()
    assert timings.steps() == []


def test_a_put_is_noted_when_it_is_complete(new: Callable[..., Machine]):
    sender, receiver = new(name="a"), new(name="b")
    sender.stepper.timings = timings = StepTimings()
    send, lease = new_send(sender, receiver, 0, 96)
    sender.stepper.submit(send)
    sender.run_until_idle()
    while not send.done.done():  # the put is on a thread of its own
        sender.stepper.step()
    ((count, seconds),) = timings.puts()
    assert count == 96 * sender.cache.layout.layers * sender.cache.layout.token_bytes
    assert seconds == send.put.copy_s > 0
    receiver.cache.release(lease.lease_id)


def test_rare_kinds_are_kept_among_many_of_one_kind():
    timings = StepTimings()
    timings.add_step(StepWork(500, 500**2), 1.0)
    for number in range(1000):
        timings.add_step(StepWork(decodes=9, context=1024 + number), 0.01)
    found = timings.steps()
    assert (StepWork(500, 500**2), 1.0) in found and len(found) == 1 + RECENT
    kept = sorted(work.context for work, _ in found if work.decodes)
    assert kept == list(range(2024 - RECENT, 2024))  # the latest, each once
    first = [work.decodes for work, _ in found[:2]]  # one of each kind
    assert sorted(first) == [0, 9] and found[2][0].context == 2022


def test_kinds_are_bounded_and_those_without_news_go():
    timings = StepTimings()
    sizes, before = [2**n for n in range(20)], 0
    for decodes in sizes:
        for context in sizes:
            timings.add_step(StepWork(decodes=decodes, context=context), 0.01)
            timings.add_step(StepWork(1, 1), 0.02)
            steady = sum(work == StepWork(1, 1) for work, _ in timings._steps.all())
            before = max(before, steady)
            assert steady == before  # it never went
    found = timings._steps.all()
    assert len(timings.steps()) <= len(found) + RECENT
    assert len(found) == KINDS - 1 + PER_KIND
    assert sum(work == StepWork(1, 1) for work, _ in found) == PER_KIND
    assert (sizes[-1], sizes[-1]) in [(work.decodes, work.context) for work, _ in found]
    assert (1, 1) not in [(work.decodes, work.context) for work, _ in found]


@pytest.mark.parametrize("seconds", [0.0, -1.0, SHORTEST_S / 2, LONGEST_S, float("nan")])
def test_what_is_no_duration_is_not_noted(seconds: float):
    timings = StepTimings()
    timings.add_step(StepWork(1, 1), seconds)
    timings.add_put(1, seconds)
    assert timings.steps() == timings.puts() == []
