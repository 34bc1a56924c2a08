"""Leases use no wall clock: the hosts' clocks may be hours apart, and may jump."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from e2e_faults import (
    SLACK_S,
    Alone,
    Call,
    Lease,
    Memory,
    engines,
    prompt_of,
    started,
    transfer,
    until,
)
from engine_process import EngineProcess

HOURS_S = 5 * 3600.0
LEASE_MS = 2000


class WallClock:
    """The offset of a process's wall clock, in a file that the process reads."""

    def __init__(self, file: Path, offset_s: float) -> None:
        self.file = file
        self.set(offset_s)

    def set(self, offset_s: float) -> None:
        whole = self.file.with_suffix(".new")
        whole.write_text(str(offset_s))
        whole.replace(self.file)


@pytest.mark.slow
@pytest.mark.parametrize("off_s", [HOURS_S, -HOURS_S], ids=["ahead", "behind"])
def test_clocks_hours_apart(off_s: float, tmp_path: Path, alone: Alone) -> None:
    clock = WallClock(tmp_path / "clock", off_s)
    with engines(1) as right, engines(1, WALL_CLOCK=str(clock.file)) as wrong:
        pairs = [(*right, *wrong), (*wrong, *right)]
        for number, (sender, receiver) in enumerate(pairs):
            prompt = prompt_of(f"clocks {number}", 90)
            assert transfer(sender, receiver, prompt) == alone(prompt)
        for receiver in (*right, *wrong):
            clock.set(off_s)
            check_a_lease_that_nobody_claims(receiver, lambda: clock.set(2 * off_s))
        for number, (sender, receiver) in enumerate(pairs):
            # A lease with a live sender is renewed, even while the clocks jump.
            clock.set(off_s)
            prompt = prompt_of(f"long {number}", 1001)
            memory = Memory(receiver)
            lease = Lease(receiver, f"long {number}", prompt, 1000)
            send = Call(lambda lease=lease, sender=sender: lease.send(sender))
            until(lambda memory=memory, lease=lease: memory.landed(lease) > 0, "the first chunk")
            clock.set(2 * off_s)
            assert send.outcome() == "ok"
            assert started(lease) == alone(prompt)
        for engine in (*right, *wrong):
            engine.at_rest()


def check_a_lease_that_nobody_claims(receiver: EngineProcess, jump: Callable[[], None]) -> None:
    """Check that an unclaimed lease lasts its time and not much longer while the clock jumps."""
    began = time.monotonic()
    Lease(receiver, "unclaimed", prompt_of("unclaimed", 50), 48, lease_ms=LEASE_MS)
    (shown,) = receiver.state()["leases"]
    assert 0 < shown["expires_ms"] <= LEASE_MS
    jump()
    until(lambda: not receiver.state()["leases"], "the lease's end")
    assert LEASE_MS / 1000 <= time.monotonic() - began < LEASE_MS / 1000 + SLACK_S
