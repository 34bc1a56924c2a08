"""The ends of sends: where their puts have drained, also while a step is under way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
from engine_helpers import generation
from held_copies import held_copies
from stepper_machine import PROMPT, Machine, cached_send, new_send

from engine.execution.step_output import PlannedStep
from engine.protocol import Internal, LeaseExpired
from engine.scheduling.jobs import Send
from kvcache.lease.table import ReceiveLease
from kvcache.types import SeqId

OTHER = range(200, 250)


@contextmanager
def draining(
    sender: Machine, receiver: Machine, make: Callable[..., tuple[Send, ReceiveLease]]
) -> Iterator[tuple[Send, ReceiveLease, PlannedStep]]:
    """A send whose first write is held up until the end of the block, and a step under way."""
    send, lease = make(sender, receiver)
    with held_copies() as held:
        sender.stepper.submit(send)
        sender.run_until_idle()
        assert held.reached.wait(20)
        sender.stepper.submit(generation(9, OTHER, max_tokens=1))
        step = sender.stepper.begin()
        assert [job.seq_id for job, _ in step.plan] == [9]
        yield send, lease, step


def computed_send(sender: Machine, receiver: Machine) -> tuple[Send, ReceiveLease]:
    return new_send(sender, receiver, 0, 100)


def test_a_send_ends_with_its_last_put_during_a_step(new: Callable[..., Machine]):
    sender, receiver = new(name="s", budget=200), new(name="r")
    with draining(sender, receiver, computed_send) as (send, lease, step):
        assert not send.done.done() and sender.cache.prefix_tokens == 0
        sender.now += 0.5
    reply = send.done.result(20)
    # At once the sender has the prefix and the pages, and the receiver the KV.
    assert (reply.sent_tokens, reply.cached_tokens, reply.computed_tokens) == (100, 0, 100)
    assert reply.bytes == 100 * 2 * sender.cache.layout.token_bytes
    assert (reply.ms, reply.put_ms) == (pytest.approx(610), pytest.approx(500))
    assert sender.cache.prefix_tokens == 96
    assert sender.cache.page_use().active == 4  # the step's
    sender.cache.check_integrity()
    assert receiver.cache.start_lease(lease.lease_id, SeqId(7), [*PROMPT, 1], 100) == 100
    receiver.cache.remove_sequence(SeqId(7))
    (output,) = sender.stepper.end(step)
    assert output.finish == "length"
    assert sender.run_until_idle().next_at is None


def test_a_put_that_fails_during_a_step_fails_its_send_at_once(new: Callable[..., Machine]):
    sender, receiver = new(name="s", budget=200), new(name="r")
    with draining(sender, receiver, computed_send) as (send, lease, step):
        receiver.cache.release(lease.lease_id)
    with pytest.raises(LeaseExpired):
        send.done.result(20)
    assert sender.cache.prefix_tokens == 0 and sender.cache.page_use().active == 4
    sender.stepper.end(step)
    receiver.cache.sweep()


@pytest.mark.parametrize("make", [computed_send, cached_send])
def test_a_send_that_is_aborted_during_a_step_ends_when_nothing_reads_its_pages(
    new: Callable[..., Machine], make: Callable[..., tuple[Send, ReceiveLease]]
):
    sender, receiver = new(name="s", budget=200), new(name="r")
    cached = 96 if make is cached_send else 0
    with draining(sender, receiver, make) as (send, lease, step):
        sender.stepper.abort(send)
        assert not send.done.done()
    with pytest.raises(Internal, match="aborted"):
        send.done.result(20)
    assert sender.cache.prefix_tokens == cached
    assert sender.cache.page_use().active == 4
    sender.stepper.end(step)
    sender.run_until_idle()
    receiver.cache.release(lease.lease_id)


def test_the_pages_are_held_until_the_put_has_drained(new: Callable[..., Machine]):
    sender, receiver = new(name="s", budget=200), new(name="r")
    with draining(sender, receiver, computed_send) as (send, lease, step):
        sender.stepper.abort(send)
        sender.stepper.end(step)
        sender.run_until_idle()
        assert sender.cache.page_use().active == 7 and not send.done.done()
    with pytest.raises(Internal, match="aborted"):
        send.done.result(20)
    assert sender.cache.page_use().active == 0
    receiver.cache.release(lease.lease_id)


def test_a_failure_of_the_step_does_not_reach_a_send_that_has_ended(
    new: Callable[..., Machine], caplog: pytest.LogCaptureFixture
):
    """Sampling fails, but the KV of the send is computed and has landed meanwhile."""
    sender, receiver = new(name="s", budget=200), new(name="r")
    send, lease = new_send(sender, receiver, 0, 100)
    sender.stepper.submit(send)
    sender.stepper.submit(generation(9, OTHER, max_tokens=1))

    def sample(logits: None, generations: Sequence[object]) -> list[object]:
        send.done.result(20)
        raise RuntimeError("boom")

    sender.stepper._sample = sample
    result = sender.stepper.step()
    assert result.chunks == 2 and "boom" in str(result.outputs[0].failure)
    assert send.done.result(0).sent_tokens == 100 and send.failure is None
    sender.run_until_idle()
    receiver.cache.release(lease.lease_id)


def test_the_stepper_hears_of_free_pages(new: Callable[..., Machine]):
    """What waits for them begins before the next sweep is due."""
    sender, receiver = new(name="s", pages=8), new(name="r")
    send, lease = new_send(sender, receiver, 0, 96)
    woken = threading.Event()
    with held_copies():
        sender.stepper.submit(send)
        sender.stepper.submit(waits := generation(9, OTHER, max_tokens=1))
        sender.run_until_idle()
        assert sender.scheduler.waiting == [waits]
        sender.stepper.wake = woken.set
    assert woken.wait(20)
    send.done.result(20)
    sender.run_until_idle()
    assert len(sender.tokens(waits)) == 1
    receiver.cache.release(lease.lease_id)


def test_bookkeeping_that_fails_fails_the_send_and_ends_the_stepper(
    new: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    sender, receiver = new(name="s", budget=200), new(name="r")

    def publish(seq_id: SeqId, tokens: Sequence[int]) -> None:
        raise Internal("the counts disagree")

    with draining(sender, receiver, computed_send) as (send, lease, step):
        monkeypatch.setattr(sender.cache, "publish", publish)
    with pytest.raises(Internal, match="the send failed: the counts disagree"):
        send.done.result(20)
    monkeypatch.undo()
    sender.stepper.end(step)
    with pytest.raises(Internal, match="the counts disagree"):
        sender.stepper.step()
    sender.cache.remove_sequence(send.seq_id)
    receiver.cache.release(lease.lease_id)


def test_the_first_outcome_of_a_send_counts(
    new: Callable[..., Machine], caplog: pytest.LogCaptureFixture
):
    """The step loop may have stopped, which fails all calls, while a put drains."""
    sender, receiver = new(name="s", budget=200), new(name="r")
    with draining(sender, receiver, computed_send) as (send, lease, step):
        send.complete(Internal("the step loop has stopped"))
    send.put.close().result(20)
    send.complete(Internal("too late"))
    assert caplog.text == ""
    with pytest.raises(Internal, match="stopped"):
        send.done.result(0)
    assert not send.started and sender.cache.prefix_tokens == 96
    sender.stepper.end(step)
    sender.run_until_idle()
    receiver.cache.release(lease.lease_id)
