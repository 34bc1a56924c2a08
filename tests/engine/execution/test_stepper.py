"""The stepper without a thread, a model or a wall clock: the clock advances with each step."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future
from types import FrameType
from typing import Any

import pytest
from engine_helpers import generation
from stepper_machine import PROMPT, STEP_S, TOKEN_S, Machine, cached_send, sweep

from engine.execution.step_output import StepResult
from engine.execution.stepper import STUCK_SWEEPS, SWEEP_S
from engine.protocol import Internal, NoCapacity
from engine.scheduling import parallel_sampling
from engine.scheduling.jobs import Generation, Send
from kvcache.types import SeqId

MAX_CALLS_PER_DECODE = 30  # Python functions, called by one step


def test_an_idle_stepper_waits_for_work(new: Callable[..., Machine]):
    machine = new()
    assert machine.stepper.step() == StepResult(0, (), None)
    woken: list[float] = []
    machine.stepper.wake = lambda: woken.append(machine.now)
    machine.stepper.submit(generation(1, PROMPT))
    machine.scheduler.wake()  # the end of a swap wakes it too
    assert woken == [0.0, 0.0]


def test_prefill_and_decode_take_the_clocks_time(new: Callable[..., Machine]):
    machine = new()
    job = generation(1, PROMPT, max_tokens=3)
    machine.stepper.submit(job)
    assert machine.steps == []  # nothing happens before the step
    result = machine.stepper.step()
    assert (result.chunks, list(result.outputs), result.next_at) == (1, [], machine.now)
    machine.run_until_idle()
    assert machine.steps == [[64], [36], [1], [1]]
    assert machine.tokens(job) == [100, 101, 102]
    assert [output.finish for output in machine.outputs] == [None, None, "length"]
    stats = machine.stepper.stats
    assert (stats.steps, stats.prompt_tokens, stats.generation_tokens) == (4, 99, 3)
    assert stats.step_s == stats.model_s == pytest.approx(4 * STEP_S + 102 * TOKEN_S)
    assert machine.cache.prefix_tokens == 96


def test_a_step_of_decodes_costs_few_calls(new: Callable[..., Machine]):
    """The step's overhead is interpreter time; it is bounded by the number of calls per decode."""
    machine = new()
    for n in range(16):
        machine.stepper.submit(generation(n, [n, 1, 2], max_tokens=12))
    machine.stepper.step()
    while machine.steps[-1] != [1] * 16:
        machine.stepper.step()
    calls = 0

    def count(frame: FrameType, event: str, arg: object) -> None:
        nonlocal calls
        calls += event == "call"

    steps = len(machine.steps)
    sys.setprofile(count)
    try:
        for _ in range(4):
            machine.stepper.step()
    finally:
        sys.setprofile(None)
    assert machine.steps[steps:] == [[1] * 16] * 4
    assert calls / (4 * 16) < MAX_CALLS_PER_DECODE
    machine.run_until_idle()


def test_an_abort_takes_effect_with_the_next_step(new: Callable[..., Machine]):
    machine = new()
    job, other = generation(1, PROMPT, max_tokens=400), generation(2, [1, 2], max_tokens=10)
    machine.stepper.submit(job)
    machine.stepper.submit(other)
    for _ in range(4):
        machine.stepper.step()
    before = machine.tokens(job)
    assert before
    machine.stepper.abort(job)
    flushed = machine.stepper.flush()
    assert not flushed.done()
    machine.stepper.step()
    assert flushed.done()
    machine.run_until_idle()
    assert machine.tokens(job) == before
    assert machine.outputs[-1].finish == "length"
    machine.stepper.abort(job)  # has no effect any more
    machine.run_until_idle()


def test_a_failing_step_fails_its_jobs_only(
    new: Callable[..., Machine], caplog: pytest.LogCaptureFixture
):
    machine = new()
    failing, later = generation(1, PROMPT), generation(2, PROMPT, max_tokens=2)
    machine.stepper.submit(failing)
    machine.failure = RuntimeError("boom")
    (output,) = machine.stepper.step().outputs
    assert isinstance(output.failure, Internal)
    assert "boom" in output.failure.message
    assert "a step failed" in caplog.text
    assert machine.stepper.stats.failed_steps == 1
    assert machine.cache.prefix_tokens == 0
    machine.stepper.submit(later)
    machine.run_until_idle()
    assert len(machine.tokens(later)) == 2


def test_an_error_outside_the_computation_ends_the_stepper(new: Callable[..., Machine]):
    machine = new()
    machine.scheduler.plan = lambda: 1 / 0  # type: ignore[assignment,method-assign,return-value]
    with pytest.raises(ZeroDivisionError):
        machine.stepper.step()


def test_preempted_generations_resume_where_they_were(new: Callable[..., Machine]):
    machine = new(pages=10)
    jobs = [generation(n, range(200 * n, 200 * n + 40), max_tokens=40) for n in range(3)]
    for job in jobs:
        machine.stepper.submit(job)
    machine.run_until_idle()
    assert machine.scheduler.preemptions > 0
    for job in jobs:
        assert machine.tokens(job) == list(range(40, 80))


def test_leases_and_retained_prompts_expire_by_the_clock(new: Callable[..., Machine]):
    machine = new()
    machine.stepper.submit(parent := generation(1, PROMPT, max_tokens=1))
    parent.forks = 1
    idle = machine.run_until_idle()
    assert machine.cache.page_use().active > 0  # retained for the announced child
    assert idle.next_at is not None
    steps = 0
    while idle.next_at is not None:
        assert machine.now < idle.next_at <= machine.now + SWEEP_S
        machine.now, steps = idle.next_at, steps + 1
        idle = machine.stepper.step()
    assert steps >= parallel_sampling.RETAIN_S / SWEEP_S
    assert machine.cache.page_use().active == 0


def test_a_send_closes_when_its_writes_have_drained(new: Callable[..., Machine]):
    sender, receiver = new(name="s"), new(name="r")
    lease, address = receiver.cache.prep_recv("r", PROMPT, 100, 0, 5.0)
    put = sender.cache.open_put(address, PROMPT, 0, 100)
    sender.cache.add_sequence(SeqId(1), PROMPT)
    sender.cache.grow(SeqId(1), 100)
    done: Future[object] = Future()
    send = Send("s", SeqId(1), PROMPT, 0, 0, put, done, 0.0, True)  # type: ignore[arg-type]
    sender.stepper.submit(send)
    sender.run_until_idle()
    put.close().result(10)
    sender.run_until_idle()
    reply = send.done.result(0)
    assert (reply.sent_tokens, reply.computed_tokens) == (100, 100)
    assert reply.ms == pytest.approx(1000 * (2 * STEP_S + 100 * TOKEN_S))
    assert reply.put_ms == 0.0
    assert receiver.cache.lease(lease.lease_id).landed == 100
    sender.stepper.abort(send)  # has no effect any more
    assert sender.run_until_idle().next_at is None
    assert not sender.stepper._closing
    receiver.cache.release(lease.lease_id)


def test_a_send_that_is_closing_can_be_aborted(new: Callable[..., Machine]):
    """All of it is computed, as that of a migration is from the start, but not yet written."""
    sender, receiver = new(name="s"), new(name="r")
    send, lease = cached_send(sender, receiver)
    region = receiver.cache.transport.region
    assert region.try_acquire_right(lease.slot)  # holds up the writes
    sender.stepper.submit(send)
    sender.run_until_idle()
    sender.stepper.abort(send)
    sender.run_until_idle()
    region.release_right(lease.slot)
    send.put.close().result(10)
    sender.run_until_idle()
    with pytest.raises(Internal, match="aborted"):
        send.done.result(0)
    assert send.put.bytes_sent == 0
    assert receiver.cache.lease(lease.lease_id).landed == 0
    assert sender.cache.page_use().active == 0


def test_an_aborted_send_writes_nothing_during_the_step_either(new: Callable[..., Machine]):
    sender, receiver = new(name="s"), new(name="r")
    send, lease = cached_send(sender, receiver)
    region = receiver.cache.transport.region
    assert region.try_acquire_right(lease.slot)
    sender.stepper.submit(send)
    sender.run_until_idle()
    sender.stepper.abort(send)  # the next step has not begun
    region.release_right(lease.slot)
    send.put.close().result(10)
    assert send.put.bytes_sent == 0
    sender.run_until_idle()
    with pytest.raises(Internal, match="aborted"):
        send.done.result(0)


def test_a_wait_for_pages_that_nothing_here_frees_ends(new: Callable[..., Machine]):
    """The generations behind it, which have room, would wait with it."""
    machine = new(pages=10)
    lease, _ = machine.cache.prep_recv("r", range(200, 280), 80, 0, 1e9)  # half of the pages
    large, small = generation(1, PROMPT, max_tokens=2), generation(2, [1, 2], max_tokens=2)
    machine.stepper.submit(large)
    machine.stepper.submit(small)
    sweep(machine, 2)
    machine.now += 1000  # the process was stopped: time alone is no reason
    sweep(machine, STUCK_SWEEPS - 3)
    assert machine.outputs == []
    sweep(machine, 5)
    output = machine.outputs[0]
    assert output.generation is large and isinstance(output.failure, NoCapacity)
    machine.run_until_idle()
    assert len(machine.tokens(small)) == 2
    machine.cache.release(lease.lease_id)


def test_a_wait_for_running_jobs_does_not_end(new: Callable[..., Machine]):
    machine = new(pages=10)
    running, large = generation(1, [1], max_tokens=100), generation(2, range(150), max_tokens=2)
    machine.stepper.submit(running)
    machine.stepper.submit(large)
    for _ in range(99):
        sweep(machine, 3)
    machine.run_until_idle()
    assert len(machine.tokens(large)) == 2


def test_a_waiting_generation_keeps_new_leases_and_sends_from_its_pages(
    new: Callable[..., Machine],
):
    """A steady stream of them would otherwise keep it waiting for ever."""
    machine = new(pages=10)
    running, large = generation(1, range(60), max_tokens=9), generation(2, range(150), max_tokens=2)
    machine.stepper.submit(running)
    machine.stepper.step()
    machine.stepper.submit(large)
    machine.stepper.step()
    with pytest.raises(NoCapacity):
        machine.cache.prep_recv("r", range(200, 216), 16, 0, 1e9)
    machine.run_until_idle()
    assert len(machine.tokens(large)) == 2
    machine.stepper.submit(large := generation(3, range(150), max_tokens=2))
    machine.cache.prep_recv("r", range(200, 216), 16, 0, 1e9)
    machine.stepper.step()
    machine.stepper.abort(large)
    machine.stepper.step()
    machine.cache.prep_recv("s", range(216, 232), 16, 0, 1e9)  # no longer reserved


TORCHLESS = (
    "engine.scheduling.scheduler",
    "engine.scheduling.parallel_sampling",
    "engine.execution.stepper",
    "engine.sampling.sampled",
    "engine.protocol",
)


@pytest.mark.processes
def test_the_stepper_needs_no_torch():
    code = f"import sys, {', '.join(TORCHLESS)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# Choices of one prompt


def choices(*, forks: int = 1, **options: Any) -> tuple[Generation, Generation]:
    """Return a generation and another choice of its prompt."""
    parent, child = (generation(n, PROMPT, **{"max_tokens": 3, **options}) for n in (1, 2))
    parent.forks, child.fork_of = forks, parent.request_id
    return parent, child


def test_an_aborted_choice_that_waits_computes_nothing(new: Callable[..., Machine]):
    machine = new(budget=16)
    parent, child = choices()
    for job in (parent, child):
        machine.stepper.submit(job)
    machine.stepper.step()
    assert machine.stepper.parallel_sampling.waiting == 1
    machine.stepper.abort(child)
    machine.run_until_idle()
    assert machine.stepper.parallel_sampling.waiting == 0
    assert (machine.tokens(parent), machine.tokens(child)) == ([100, 101, 102], [])
    stats = machine.stepper.stats
    assert (stats.prompt_tokens, stats.generation_tokens) == (99, 3)
    assert not machine.scheduler.running and not machine.scheduler.waiting


def test_a_choice_whose_first_one_fails_computes_the_prompt_itself(
    new: Callable[..., Machine], caplog: pytest.LogCaptureFixture
):
    machine = new()
    parent, child = choices()
    for job in (parent, child):
        machine.stepper.submit(job)
    machine.failure = RuntimeError("boom")
    machine.run_until_idle()
    assert (machine.tokens(parent), machine.tokens(child)) == ([], [100, 101, 102])


def test_a_prompt_is_retained_until_the_last_expected_choice(new: Callable[..., Machine]):
    machine = new()
    parent, child = choices(max_tokens=1)
    machine.stepper.submit(parent)
    machine.run_until_idle()
    assert machine.stepper.parallel_sampling.retaining
    assert machine.cache.page_use().active > 0
    machine.stepper.submit(child)
    machine.run_until_idle()
    assert machine.tokens(child) == [100]
    assert machine.stepper.stats.prompt_tokens == 99
    assert not machine.stepper.parallel_sampling.retaining
    assert machine.cache.page_use().active == 0
    assert machine.now < parallel_sampling.RETAIN_S


def test_a_prompt_that_was_not_computed_is_not_retained(new: Callable[..., Machine]):
    machine = new()
    parent, _ = choices()
    machine.stepper.submit(parent)
    machine.stepper.step()  # 64 of its 100 tokens
    machine.stepper.abort(parent)
    machine.stepper.step()
    assert not machine.stepper.parallel_sampling.retaining
    assert machine.cache.page_use().active == 0


def test_a_choice_that_has_a_sequence_is_not_forked(new: Callable[..., Machine]):
    """It has started from a lease."""
    machine = new()
    parent, child = choices()
    machine.cache.add_sequence(child.seq_id)
    child.started, child.begin = True, 0
    for job in (parent, child):
        machine.stepper.submit(job)
    machine.run_until_idle()
    assert machine.tokens(parent) == machine.tokens(child) == [100, 101, 102]
    assert machine.stepper.stats.failed_steps == 0


def test_a_fork_without_room_to_grow_starts_later(new: Callable[..., Machine]):
    machine = new(pages=9)
    parent, child = choices(max_tokens=42)
    parent.sampling.max_tokens = 2
    child.tokens += range(100, 140)  # nine pages, of which it would share six
    for job in (parent, child):
        machine.stepper.submit(job)
    machine.run_until_idle()
    assert (machine.tokens(parent), machine.tokens(child)) == ([100, 101], [140, 141])
    assert machine.stepper.stats.failed_steps == 0


def test_a_request_id_that_is_used_again_leaves_no_retained_prompt(new: Callable[..., Machine]):
    machine = new()
    for number in (1, 2):
        job = generation(number, [number, *PROMPT], max_tokens=2)
        job.request_id, job.forks = "again", 1
        machine.stepper.submit(job)
        machine.run_until_idle()
        assert machine.tokens(job) == [101, 102]
    assert machine.stepper.parallel_sampling.retaining
    machine.now += parallel_sampling.RETAIN_S + SWEEP_S
    machine.stepper.step()
    assert not machine.stepper.parallel_sampling.retaining
    assert machine.cache.page_use().active == 0


def test_an_idle_stepper_sweeps_while_something_can_expire(new: Callable[..., Machine]):
    machine = new(pages=10)
    lease, _ = machine.cache.prep_recv("r", [1, 2], 2, 0, 1e9)
    assert machine.stepper.step().next_at == SWEEP_S
    machine.cache.release(lease.lease_id)
    assert machine.stepper.step().next_at is None
    machine.cache.add_sequence(SeqId(9))
    machine.cache.grow(SeqId(9), 10 * 16)
    machine.stepper.submit(generation(1, PROMPT, max_tokens=1))
    assert machine.stepper.step() == StepResult(0, (), SWEEP_S)  # it waits for room
    machine.cache.remove_sequence(SeqId(9))
    machine.run_until_idle()
