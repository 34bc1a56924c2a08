"""The latest steps and puts of an engine with their times: what is kept, and its bounds."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from engine_helpers import generation
from stepper_machine import PROMPT, STEP_S, TOKEN_S, Machine, new_send

from engine.execution.recent_work import NAME_BYTES, RecentPut, RecentWork
from engine.protocol import TIMELINE_PUTS, TIMELINE_S, TIMELINE_STEP_REQUESTS, TIMELINE_STEPS


def watched(machine: Machine) -> RecentWork:
    machine.stepper.recent = recent = RecentWork(lambda: machine.now)
    return recent


def test_every_step_is_kept_with_its_time_and_the_requests_whose_prompts_it_computed(
    new: Callable[..., Machine],
):
    machine = new()
    recent = watched(machine)
    machine.now = 50.0
    machine.stepper.submit(generation(1, PROMPT, max_tokens=3))
    machine.run_until_idle()
    assert [(step[2:4], step.requests) for step in recent.steps(60)] == [
        ((64, 0), ("r1",)), ((36, 0), ("r1",)), ((0, 1), ()), ((0, 1), ()),
    ]  # fmt: skip
    at = 50.0
    for step, tokens in zip(recent.steps(60), (64, 36, 1, 1), strict=True):
        assert (step.began, step.seconds) == pytest.approx((at, STEP_S + tokens * TOKEN_S))
        at += step.seconds
    machine.now += 10
    assert recent.steps(9.9) == [] and len(recent.steps(10 + 1.5 * STEP_S)) == 2


def test_a_step_names_a_few_of_many_requests(new: Callable[..., Machine]):
    machine = new()
    recent = watched(machine)
    for number in range(1, 9):
        machine.stepper.submit(generation(number, [number] * 8, max_tokens=1))
    machine.stepper.step()
    (step,) = recent.steps(60)
    assert step.requests == ("r1", "r2", "r3", "r4") and step.prompt_tokens == 64
    assert len(step.requests) == TIMELINE_STEP_REQUESTS


def test_a_put_is_kept_from_its_first_copy_to_its_end(new: Callable[..., Machine]):
    sender, receiver = new(name="a"), new(name="b")
    sender.stepper.recent = recent = RecentWork(time.monotonic)  # puts are on other threads
    send, lease = new_send(sender, receiver, 0, 96)
    before = time.monotonic()
    sender.stepper.submit(send)
    sender.run_until_idle()
    reply = send.done.result(10)
    (put,) = recent.puts(60)
    assert (put.request, put.bytes) == (send.request_id, reply.bytes)
    assert before <= put.began and put.began + put.copying_s <= time.monotonic()
    receiver.cache.release(lease.lease_id)


def test_it_is_bounded_in_time_number_and_names():
    now = 0.0
    recent = RecentWork(lambda: now)
    for _ in range(TIMELINE_STEPS + 100):
        recent.add_step([], now, 0.001, (1, 0))
        recent.add_put(RecentPut(now, 0.001, 0.001, 7, "r"))
        now += 0.01
    assert len(recent.steps(1e9)) == TIMELINE_STEPS and len(recent.puts(1e9)) == TIMELINE_PUTS
    assert recent.steps(1e9)[-1].began == pytest.approx(now - 0.01)
    now += 2 * TIMELINE_S
    recent.add_step([], now, 0.001, (1, 0))
    assert [step.began for step in recent.steps(1e9)] == [now]
    for number in range(1 << 14):  # of the longest names that requests can have
        recent.add_put(RecentPut(now, 0.001, 0.001, number, "r" * 128))
    assert TIMELINE_PUTS * 128 <= sum(len(put.request) for put in recent.puts(1e9)) <= NAME_BYTES
