"""The clock that stands still while this process does not run."""

from __future__ import annotations

import asyncio

from router.base.awake_clock import LATE_S, TICK_S, AwakeClock, fired_late


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_of_a_gap_between_ticks_only_a_part_counts():
    clock, stalls = Clock(), []
    awake = AwakeClock(on_stall=stalls.append, clock=clock)
    began = awake()
    for _ in range(8):
        clock.now += TICK_S
        awake.tick()
    assert awake() - began == 8 * TICK_S
    assert not stalls
    clock.now += 3600.0
    assert awake() - began == 8 * TICK_S + LATE_S  # also before the tick
    awake.tick()
    assert awake() - began == 8 * TICK_S + LATE_S
    assert stalls == [3600.0 - TICK_S]
    clock.now += TICK_S
    assert awake() - began == 9 * TICK_S + LATE_S


async def test_a_timer_that_is_held_up_is_late():
    loop = asyncio.get_running_loop()
    for held_up_s, late in ((0.0, False), (LATE_S + 0.1, True)):
        fired = loop.create_future()
        timer = loop.call_at(loop.time() - held_up_s, lambda to=fired: to.set_result(None))
        await fired
        assert fired_late(timer) is late
