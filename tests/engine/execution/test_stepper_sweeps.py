"""What the stepper does between steps: sweeps, and the end of waits for room."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from engine_helpers import generation
from stepper_machine import PROMPT, FakeMirror, Machine, cached_send, new_send, sweep

from engine.execution.stepper import STUCK_SWEEPS, SWEEP_S
from engine.protocol import LeaseExpired, NoCapacity
from engine.scheduling.jobs import Generation
from kvcache.lease.table import ReceiveLease


def without_room(machine: Machine) -> tuple[Generation, ReceiveLease]:
    """Return a generation that waits for the pages of a lease, and the lease."""
    lease, _ = machine.cache.prep_recv("r", range(200, 280), 80, 0, 1e9)  # half of the pages
    job = generation(1, PROMPT, max_tokens=2)
    machine.stepper.submit(job)
    machine.stepper.step()
    assert machine.scheduler.stuck is job
    return job, lease


def test_sweeps_are_fifty_milliseconds_apart(
    new: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch
):
    machine = new()
    sweep_cache, swept = machine.cache.sweep, []
    monkeypatch.setattr(machine.cache, "sweep", lambda: swept.append(machine.now) or sweep_cache())
    for now in (0.0, 0.049, 0.05, 0.06, 0.099, 0.1, 0.3, 0.349, 0.36):
        machine.now = now
        machine.stepper.step()
    assert swept == [0.05, 0.1, 0.3, 0.36]


def test_expired_leases_are_counted(new: Callable[..., Machine]):
    machine = new()
    for name in ("first", "second"):
        machine.cache.prep_recv(name, [1, 2], 2, 0, 1e-9)
    sweep(machine, 1)
    machine.cache.prep_recv("third", [1, 2], 2, 0, 1e-9)
    sweep(machine, 2)
    assert machine.stepper.stats.expired_leases == 3


def test_a_wait_without_room_lasts_ten_seconds(new: Callable[..., Machine]):
    assert pytest.approx(10) == STUCK_SWEEPS * SWEEP_S
    machine = new(pages=10)
    job, lease = without_room(machine)
    sweep(machine, STUCK_SWEEPS)
    assert machine.outputs == [] and machine.scheduler.waiting == [job]
    sweep(machine, 1)
    (output,) = machine.outputs
    assert output.generation is job and isinstance(output.failure, NoCapacity)
    assert "100 tokens" in output.failure.message
    assert machine.scheduler.waiting == []
    assert machine.cache.prefix_tokens == 0
    machine.cache.release(lease.lease_id)


def test_each_head_of_the_queue_has_its_own_wait(new: Callable[..., Machine]):
    machine = new(pages=10)
    job, lease = without_room(machine)
    machine.stepper.submit(second := generation(2, PROMPT, max_tokens=2))
    sweep(machine, STUCK_SWEEPS)
    machine.stepper.abort(job)
    machine.stepper.step()
    assert machine.scheduler.stuck is second
    sweep(machine, STUCK_SWEEPS)
    assert machine.outputs == []
    sweep(machine, 1)
    assert [output.generation for output in machine.outputs] == [second]
    machine.cache.release(lease.lease_id)


def test_a_swapped_generation_without_room_is_computed_again_before_it_fails(
    new: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch
):
    """As a prompt it needs fewer pages, and has as much time again to find them."""
    machine, dropped = new(pages=10), []
    job, lease = without_room(machine)

    def drop_swap(job: Generation) -> bool:
        dropped.append(job)
        return len(dropped) == 1

    monkeypatch.setattr(machine.scheduler, "drop_swap", drop_swap)
    sweep(machine, STUCK_SWEEPS + 1)
    assert dropped == [job] and machine.outputs == []
    sweep(machine, STUCK_SWEEPS)
    assert dropped == [job] and machine.outputs == []
    sweep(machine, 1)
    assert dropped == [job, job]
    assert isinstance(machine.outputs[0].failure, NoCapacity)
    machine.cache.release(lease.lease_id)


def test_an_idle_stepper_sweeps_while_a_send_closes(new: Callable[..., Machine]):
    sender, receiver = new(name="s"), new(name="r")
    send, lease = cached_send(sender, receiver)
    region = receiver.cache.transport.region
    assert region.try_acquire_right(lease.slot)  # holds up the writes
    sender.stepper.submit(send)
    idle = sender.run_until_idle()
    assert idle.next_at is not None and sender.now < idle.next_at <= sender.now + SWEEP_S
    assert not sender.scheduler.sends
    # The steps no longer know of its put.
    assert sender.cache.bookkeeping.sequences.sending(send.seq_id) is None
    region.release_right(lease.slot)
    send.put.close().result(10)
    assert sender.run_until_idle().next_at is None
    assert send.done.result(0).sent_tokens == 96
    receiver.cache.release(lease.lease_id)


def test_the_lease_of_a_send_is_renewed_in_each_sweep(
    new: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch
):
    sender, receiver = new(budget=16, name="s"), new(name="r")
    send, lease = new_send(sender, receiver, 0, 100)
    renewed: list[float] = []
    monkeypatch.setattr(send.put, "renew", lambda: renewed.append(sender.now))
    sender.stepper.submit(send)
    sweep(sender, 3)
    assert renewed == pytest.approx([SWEEP_S, 2 * SWEEP_S + 0.026, 3 * SWEEP_S + 0.052])
    sender.run_until_idle()
    count = len(renewed)
    send.put.close().result(10)
    sweep(sender, 2)  # it has ended
    assert len(renewed) == count
    assert send.done.result(0).sent_tokens == 100
    receiver.cache.release(lease.lease_id)


def test_a_send_whose_put_has_failed_is_computed_no_further(new: Callable[..., Machine]):
    sender, receiver = new(budget=16, name="s"), new(name="r")
    send, lease = new_send(sender, receiver, 0, 100)
    sender.stepper.submit(send)
    sender.stepper.step()
    send.put.close().result(10)  # its writes have ended
    receiver.cache.release(lease.lease_id)
    send.put.renew()  # notices that the lease has ended
    with pytest.raises(LeaseExpired):
        send.put.close().result(10)
    assert send.put.failed and sender.steps == [[16]]
    sweep(sender, 1)
    assert sender.steps == [[16]]
    with pytest.raises(LeaseExpired):
        send.put.close().result(10)
    sender.run_until_idle()
    with pytest.raises(LeaseExpired):
        send.done.result(0)
    assert sender.steps == [[16]] and sender.cache.prefix_tokens == 0


def test_the_mirrors_of_waiting_generations_are_renewed(new: Callable[..., Machine]):
    machine = new(pages=10)
    lease, _ = machine.cache.prep_recv("r", range(200, 280), 80, 0, 1e9)
    job = generation(1, PROMPT, max_tokens=2)
    job.mirror = mirror = FakeMirror()
    machine.stepper.submit(job)
    sweep(machine, 3)
    assert mirror.calls == ["renew"] * 3
    machine.stepper.abort(job)
    sweep(machine, 1)
    assert mirror.calls == ["renew"] * 3 + ["end"]
    machine.cache.release(lease.lease_id)
