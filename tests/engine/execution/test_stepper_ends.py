"""How generations and sends end, and what a step counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
from engine_helpers import generation
from stepper_machine import (
    PROMPT,
    STEP_S,
    TOKEN_S,
    FakeMirror,
    Machine,
    cached_send,
    new_send,
)

from engine.execution.step_output import StepStats
from engine.protocol import BadRequest, Internal, LeaseExpired, NoCapacity
from kvcache.cache import KVCache


def finishes(machine: Machine) -> list[str | None]:
    return [output.finish for output in machine.outputs]


def test_counters_start_at_zero():
    assert not any(asdict(StepStats()).values())


# Tokens


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"max_tokens": 1}, ["length"]),
        ({"max_tokens": 3}, [None, None, "length"]),
        ({"max_tokens": 3, "stop_token_ids": [3]}, [None, "stop"]),  # its tokens are 2, 3 and 4
        ({"max_tokens": 3, "stop_token_ids": [9, 4]}, [None, None, "stop"]),
        ({"max_tokens": 3, "stop_token_ids": [9, 5]}, [None, None, "length"]),
        ({"max_tokens": 3, "output": [7]}, [None, "length"]),
        ({"max_tokens": 3, "output": [7, 7]}, ["length"]),
        ({"max_tokens": 3, "output": [7] * 5}, ["length"]),  # no engine gives more than asked for
    ],
)
def test_a_generation_ends_with_a_stop_token_or_the_last_token(
    new: Callable[..., Machine], options: dict[str, Any], expected: list[str | None]
):
    machine = new()
    machine.stepper.submit(generation(1, [0, 1], **options))
    machine.run_until_idle()
    assert finishes(machine) == expected
    assert machine.stepper.stats.generation_tokens == len(expected)
    assert not machine.scheduler.running


def test_the_end_of_its_grammar_ends_a_generation(new: Callable[..., Machine]):
    class Matcher:
        @property
        def finished(self) -> bool:
            return len(job.tokens) == 4

    machine, job = new(), generation(1, [0, 1], max_tokens=9)
    job.matcher = Matcher()  # type: ignore[assignment]
    machine.stepper.submit(job)
    machine.run_until_idle()
    assert finishes(machine) == [None, "stop"]


def test_a_generation_without_a_possible_token_fails_alone(new: Callable[..., Machine]):
    machine, failure = new(), BadRequest("no token")
    failing, other = generation(1, [0, 1], max_tokens=3), generation(2, [5, 6], max_tokens=3)
    machine.unsampled[failing] = failure
    for job in (failing, other):
        machine.stepper.submit(job)
    machine.run_until_idle()
    assert [output.failure for output in machine.outputs if output.generation is failing] == [
        failure
    ]
    assert machine.tokens(failing) == [] and machine.tokens(other) == [2, 3, 4]
    assert machine.stepper.stats.failed_steps == 0
    machine.stepper.abort(failing)  # has no effect any more
    machine.run_until_idle()


@pytest.mark.parametrize("persistent", [True, False])
def test_full_pages_are_shared_at_once_if_they_outlive_the_process(
    new: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch, persistent: bool
):
    """Otherwise the prompt's pages are, and those of the output at the end."""
    monkeypatch.setattr(KVCache, "persistent", persistent)
    machine, shared = new(), {}
    job = generation(1, range(20), max_tokens=50)
    machine.stepper.submit(job)
    while not machine.outputs or machine.outputs[-1].finish is None:
        shared[machine.cache.length(job.seq_id) if job.started else 0] = machine.cache.prefix_tokens
        machine.stepper.step()
    for computed, tokens in shared.items():
        if computed >= 20:
            assert tokens == (computed // 16 * 16 if persistent else 16)
    assert machine.cache.prefix_tokens == 64  # of 69 tokens


def test_a_prompt_is_shared_with_its_first_token(
    new: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch
):
    machine = new()
    published, publish = [], machine.cache.publish
    monkeypatch.setattr(
        machine.cache, "publish", lambda *call: published.append(call) or publish(*call)
    )
    machine.stepper.submit(job := generation(1, PROMPT, max_tokens=9))
    machine.stepper.step()
    assert machine.cache.prefix_tokens == 0
    machine.stepper.step()
    assert machine.tokens(job) == [100] and machine.cache.prefix_tokens == 96
    machine.run_until_idle()
    # After 64 tokens, with the first token, and at the end; the next plan does not repeat it.
    assert len(published) == 3


def test_choices_run_together_from_the_first_token_on(new: Callable[..., Machine]):
    machine = new()
    parent, child = (generation(number, PROMPT, max_tokens=5) for number in (1, 2))
    parent.forks, child.fork_of = 1, parent.request_id
    for job in (parent, child):
        machine.stepper.submit(job)
    while not machine.tokens(parent):
        machine.stepper.step()
    assert machine.scheduler.running == [parent, child] and child.begin == 99
    machine.run_until_idle()
    assert machine.tokens(child) == machine.tokens(parent) == [100, 101, 102, 103, 104]
    assert machine.stepper.stats.prompt_tokens == 99


# Failures


def test_an_error_of_the_tree_is_told_as_it_is(
    new: Callable[..., Machine], caplog: pytest.LogCaptureFixture
):
    machine, failure = new(), NoCapacity("no memory")
    machine.failure = failure
    machine.stepper.submit(job := generation(1, PROMPT))
    (output,) = machine.stepper.step().outputs
    assert output.failure is failure and output.sampled is None and output.finish is None
    machine.stepper.abort(job)  # has no effect any more
    machine.run_until_idle()
    assert not machine.scheduler.running


def test_a_sampler_that_gives_too_few_tokens_fails_the_step(
    new: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    machine = new()
    monkeypatch.setattr(machine.stepper, "_sample", lambda logits, jobs: [])
    jobs = [generation(n, [n, 1]) for n in range(2)]
    for job in jobs:
        machine.stepper.submit(job)
    machine.stepper.step()
    assert [output.generation for output in machine.outputs] == jobs
    assert all(isinstance(output.failure, Internal) for output in machine.outputs)


def test_only_steps_that_were_computed_are_learned_from(
    new: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    machine, learned = new(), []
    monkeypatch.setattr(
        machine.scheduler, "record_steps", lambda durations, planned: learned.extend(durations)
    )
    machine.sampling_s = 0.5
    machine.stepper.submit(generation(1, PROMPT, max_tokens=2))
    machine.run_until_idle()
    model = [STEP_S + count * TOKEN_S for count in (64, 36, 1)]
    assert learned == pytest.approx([seconds + 0.5 for seconds in model])
    machine.failure = RuntimeError("boom")
    machine.stepper.submit(generation(2, [7, 8]))
    machine.run_until_idle()
    assert len(learned) == 3
    stats = machine.stepper.stats
    assert (stats.steps, stats.failed_steps) == (4, 1)
    assert stats.model_s == pytest.approx(sum(model))
    assert stats.step_s == pytest.approx(sum(learned) + STEP_S + 2 * TOKEN_S)


def test_an_aborted_generation_that_waits_for_room_leaves_nothing(new: Callable[..., Machine]):
    machine = new(pages=10)
    lease, _ = machine.cache.prep_recv("r", range(200, 280), 80, 0, 1e9)
    job = generation(1, PROMPT)
    machine.stepper.submit(job)
    machine.stepper.step()
    machine.stepper.abort(job)
    machine.stepper.step()
    assert machine.outputs == [] and machine.scheduler.waiting == []
    machine.cache.release(lease.lease_id)


def test_a_cancelled_flush_does_no_harm(new: Callable[..., Machine]):
    machine = new()
    cancelled, flushed = machine.stepper.flush(), machine.stepper.flush()
    cancelled.cancel()
    machine.stepper.step()
    assert flushed.result(0) is None


# Sends


@pytest.mark.parametrize(
    ("begin", "end", "cached", "computed"),
    [(0, 100, 96, 4), (0, 80, 80, 0), (40, 96, 56, 0), (98, 100, 0, 4)],
)
def test_a_reply_counts_the_tokens_of_its_range(
    new: Callable[..., Machine], begin: int, end: int, cached: int, computed: int
):
    sender, receiver = new(name="s"), new(name="r")
    send, lease = cached_send(sender, receiver, begin, end)
    sender.stepper.submit(send)
    sender.run_until_idle()
    send.put.close().result(10)
    sender.run_until_idle()
    reply = send.done.result(0)
    assert (reply.sent_tokens, reply.cached_tokens, reply.computed_tokens) == (
        end - begin, cached, computed,
    )  # fmt: skip
    assert reply.bytes == (end - begin) * 2 * sender.cache.layout.token_bytes
    receiver.cache.release(lease.lease_id)


def test_a_reply_tells_how_long_the_send_and_its_last_writes_took(new: Callable[..., Machine]):
    sender, receiver = new(name="s"), new(name="r")
    send, lease = cached_send(sender, receiver)
    region = receiver.cache.transport.region
    assert region.try_acquire_right(lease.slot)
    sender.stepper.submit(send)
    sender.now += 0.25
    sender.run_until_idle()
    sender.now += 0.5
    region.release_right(lease.slot)
    send.put.close().result(10)
    sender.run_until_idle()
    reply = send.done.result(0)
    assert (reply.ms, reply.put_ms) == (pytest.approx(750), pytest.approx(500))
    receiver.cache.release(lease.lease_id)


def test_a_failed_send_writes_nothing_more_and_tells_its_first_failure(
    new: Callable[..., Machine], caplog: pytest.LogCaptureFixture
):
    sender, receiver = new(budget=16, name="s"), new(name="r")
    send, lease = new_send(sender, receiver, 0, 100)
    region = receiver.cache.transport.region
    assert region.try_acquire_right(lease.slot)
    sender.stepper.submit(send)
    sender.stepper.step()
    sender.failure = NoCapacity("no memory")
    assert sender.stepper.step().outputs == []
    sender.stepper.abort(send)
    sender.run_until_idle()
    assert sender.steps == [[16], [16]]
    region.release_right(lease.slot)
    send.put.close().result(10)
    assert send.put.bytes_sent == 0
    sender.run_until_idle()
    with pytest.raises(NoCapacity, match="no memory"):
        send.done.result(0)
    assert sender.cache.prefix_tokens == 0
    assert receiver.cache.lease(lease.lease_id).landed == 0
    receiver.cache.release(lease.lease_id)


def test_an_aborted_send_is_computed_no_further(new: Callable[..., Machine]):
    sender, receiver = new(budget=16, name="s"), new(name="r")
    send, lease = new_send(sender, receiver, 0, 100)
    sender.stepper.submit(send)
    sender.stepper.step()
    sender.stepper.abort(send)
    sender.run_until_idle()
    assert sender.steps == [[16]] and not sender.scheduler.sends
    send.put.close().result(10)
    sender.run_until_idle()
    with pytest.raises(Internal, match="aborted"):
        send.done.result(0)
    receiver.cache.release(lease.lease_id)


def test_the_failure_of_a_put_is_that_of_its_send(new: Callable[..., Machine]):
    sender, receiver = new(name="s"), new(name="r")
    send, lease = cached_send(sender, receiver)
    receiver.cache.release(lease.lease_id)
    sender.stepper.submit(send)
    sender.run_until_idle()
    with pytest.raises(LeaseExpired):
        send.put.close().result(10)
    sender.run_until_idle()
    with pytest.raises(LeaseExpired):
        send.done.result(0)
    assert not send.started and sender.cache.page_use().active == 0


# Mirrors


def mirrored(machine: Machine, **options: Any) -> tuple[Any, list[str]]:
    """Return a generation and the calls of its mirror."""
    job, mirror = generation(1, PROMPT, **options), FakeMirror()
    job.mirror = mirror
    machine.stepper.submit(job)
    return job, mirror.calls


def test_a_mirror_advances_with_each_step_until_the_end(new: Callable[..., Machine]):
    machine = new()
    _, calls = mirrored(machine, max_tokens=3)
    machine.stepper.submit(generation(2, [1, 2], max_tokens=20))
    machine.run_until_idle()
    assert [call for call in calls if call != "renew"] == ["advance 1"] * 3 + ["end"]


def test_a_mirror_that_is_set_later_advances_from_then_on(new: Callable[..., Machine]):
    machine, mirror = new(), FakeMirror()
    job = generation(1, PROMPT, max_tokens=3)
    machine.stepper.submit(job)
    machine.stepper.step()
    job.mirror = mirror
    machine.stepper.advance_mirror(job)
    machine.run_until_idle()
    assert [call for call in mirror.calls if call != "renew"] == ["advance 1"] * 2 + ["end"]


@pytest.mark.parametrize("how", ["failure", "abort"])
def test_a_failure_and_an_abort_end_the_mirror(
    new: Callable[..., Machine], caplog: pytest.LogCaptureFixture, how: str
):
    machine = new()
    job, calls = mirrored(machine, max_tokens=3)
    if how == "failure":
        machine.failure = RuntimeError("boom")
    else:
        machine.stepper.abort(job)
    machine.stepper.step()
    assert calls == ["end"]
