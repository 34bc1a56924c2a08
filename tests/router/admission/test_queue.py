"""The admission queue: when waiting requests try, and in which order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
from virtual_time import in_virtual_time

from engine.protocol import NoCapacity
from router.admission.queue import LONGEST_WAIT_S, AdmissionQueue

FULL = NoCapacity("full", retry_after_s=1000)


class Room:
    """A capacity of `size` units, and the admission queue of the requests that take them."""

    def __init__(self, size: int, limit: int = 100) -> None:
        self.queue = AdmissionQueue(limit)
        self.left = size
        self.order: list[str] = []
        self.tries = 0
        self._deadline = asyncio.get_running_loop().time() + 2000

    async def ask(self, name: str, size: int = 1, *, arrived: float = 0, priority: int = 0) -> None:
        full = None
        with self.queue.place(priority, arrived) as place:
            while True:
                await place.wait(full, deadline=self._deadline)
                self.tries += 1
                await asyncio.sleep(0)  # the call to the engine
                if size <= self.left:
                    self.left -= size
                    self.order.append(name)
                    place.admitted()
                    return
                full = FULL

    def free(self, size: int) -> None:
        self.left += size
        self.queue.freed()


@asynccontextmanager
async def running(*requests: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        for request in requests:
            tasks.create_task(request)
            await let_tasks_run()
        yield


async def let_tasks_run() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


async def test_waiters_are_served_by_priority_then_by_arrival():
    room = Room(0)
    async with running(
        room.ask("third", arrived=3), room.ask("first", arrived=1), room.ask("second", arrived=2),
        room.ask("urgent", arrived=4, priority=-1), room.ask("last", arrived=0, priority=1),
    ):  # fmt: skip
        assert len(room.queue) == 5
        room.free(5)
    assert room.order == ["urgent", "first", "second", "third", "last"]
    assert not len(room.queue)


async def test_an_admitted_request_lets_the_next_try_at_once():
    """None of them waits for its Retry-After of 1000 s, which would fail the test."""
    room = Room(0)
    async with running(*(room.ask(str(number), arrived=number) for number in range(50))):
        tries = room.tries
        room.free(50)
    assert room.order == [str(number) for number in range(50)]
    assert room.tries - tries == 50  # no try fails


async def test_a_small_request_does_not_overtake_a_large_one():
    room = Room(1)
    async with running(room.ask("large", 3, arrived=1), room.ask("small", 1, arrived=2)):
        assert room.order == []
        room.free(1)
        await let_tasks_run()
        assert room.order == []
        room.free(2)
    assert room.order == ["large", "small"]


async def test_room_freed_during_a_try_is_noticed():
    room = Room(0)
    async with running(room.ask("a")):
        room.free(0)
        await asyncio.sleep(0)  # a try begins
        room.free(1)
    assert room.order == ["a"]


async def test_a_full_queue_refuses_requests_that_would_wait():
    room = Room(0, limit=1)
    async with running(room.ask("a", arrived=1)):
        with pytest.raises(NoCapacity):
            await room.ask("b", arrived=2)
        tries = room.tries
        with pytest.raises(NoCapacity):
            await room.ask("urgent", arrived=2, priority=-1)
        assert room.tries == tries + 1  # a more urgent request may try once, but not wait
        room.free(1)
    assert room.order == ["a"]


async def test_a_cancelled_wait_leaves_the_queue_and_wakes_the_next():
    room = Room(1)
    large = asyncio.ensure_future(room.ask("large", 3, arrived=1))
    await let_tasks_run()
    async with running(room.ask("small", 1, arrived=2)):
        assert len(room.queue) == 2
        large.cancel()
    assert room.order == ["small"]
    assert not len(room.queue)


async def test_a_waiter_is_refused_at_its_deadline():
    queue = AdmissionQueue(10)
    now = asyncio.get_running_loop().time()
    with queue.place(0, now) as first:
        for place in (first, None):
            with queue.place(0, now) as later, pytest.raises(NoCapacity):
                await (place or later).wait(FULL if place else None, deadline=now + 0.01)
    assert not len(queue)


async def test_a_waiter_tries_again_after_retry_after():
    queue = AdmissionQueue(10)
    loop = asyncio.get_running_loop()
    with queue.place(0, 0) as place:
        began = loop.time()
        await place.wait(NoCapacity("full", retry_after_s=0.02), deadline=began + 10)
        assert 0.02 <= loop.time() - began < 5


@in_virtual_time
async def test_a_wake_is_used_up():
    """Otherwise its request would ask the engine again and again without a pause."""
    queue = AdmissionQueue(10)
    with queue.place(0, 0) as place:
        for _ in range(3):
            waiting = asyncio.ensure_future(place.wait(FULL, deadline=2000))
            await let_tasks_run()
            assert not waiting.done()
            queue.freed()
            await let_tasks_run()
            assert waiting.done()
            await waiting


@in_virtual_time
async def test_the_wake_of_a_place_that_becomes_the_first_is_used_up():
    """It tries at once, although an engine has just been full for it, and then waits again."""
    queue = AdmissionQueue(10)
    with queue.place(0, 0) as first, queue.place(0, 1) as second:
        queue.enter(first, None)
        waiting = asyncio.ensure_future(second.wait(FULL, deadline=2000))
        await let_tasks_run()
        assert not waiting.done()
        first.admitted()
        await let_tasks_run()
        assert waiting.done()
        waiting = asyncio.ensure_future(second.wait(FULL, deadline=2000))
        await let_tasks_run()
        assert not waiting.done()
        waiting.cancel()


@in_virtual_time
async def test_only_the_end_of_the_first_wakes_the_next():
    queue = AdmissionQueue(10)
    with queue.place(0, 0) as first, queue.place(0, 1) as second:
        waiting = asyncio.ensure_future(first.wait(FULL, deadline=2000))
        await let_tasks_run()
        queue.enter(second, None)
        second.admitted()
        await let_tasks_run()
        assert not waiting.done()
        waiting.cancel()


@in_virtual_time
async def test_pauses_between_tries_grow_and_are_short_again_after_an_admission():
    loop, queue = asyncio.get_running_loop(), AdmissionQueue(10)
    at_once = NoCapacity("full", retry_after_s=0)

    async def paused(full: NoCapacity) -> float:
        began = loop.time()
        await place.wait(full, deadline=2000)
        return loop.time() - began

    with queue.place(0, 0) as place:
        for most in (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.0, 1.0):
            assert 0.8 * most <= await paused(at_once) <= most
        assert await paused(NoCapacity("full", retry_after_s=3)) == pytest.approx(3.0)
        assert await paused(FULL) == pytest.approx(LONGEST_WAIT_S)  # another may have room
        place.admitted()
        assert not len(queue)
        assert await paused(at_once) <= 0.01


@in_virtual_time
async def test_a_place_that_gives_up_says_what_an_engine_said():
    queue, loop = AdmissionQueue(1), asyncio.get_running_loop()
    with queue.place(0, 0) as place, queue.place(0, 1) as other:
        with pytest.raises(NoCapacity) as refused:
            await place.wait(FULL, deadline=1.0)
        assert refused.value is FULL and loop.time() == 1.0
        with pytest.raises(NoCapacity) as refused:
            await other.wait(FULL, deadline=9.0)
        assert refused.value is FULL and loop.time() == 1.0  # the queue is full
        with pytest.raises(NoCapacity, match="1 requests are waiting"):
            await other.wait(None, deadline=9.0)


async def test_equal_requests_are_served_as_they_came():
    queue = AdmissionQueue(10)
    places = [queue.place(0, 5.0) for _ in range(4)]
    for place in reversed(places):
        queue.enter(place, None)
    assert queue.places == places


@in_virtual_time
async def test_no_engine_makes_a_request_wait_more_than_five_seconds_for_its_next_try():
    loop, queue = asyncio.get_running_loop(), AdmissionQueue(10)
    with queue.place(0, 0) as place:
        await place.wait(FULL, deadline=2000)
        assert loop.time() == pytest.approx(5.0)
        await place.wait(NoCapacity("full", retry_after_s=4.9), deadline=2000)
        assert loop.time() == pytest.approx(9.9)


async def test_the_first_newcomer_tries_at_once_and_a_less_urgent_one_waits():
    queue = AdmissionQueue(10)
    waiting, urgent, late = queue.place(0, 5.0), queue.place(-1, 9.0), queue.place(0, 6.0)
    deadline = asyncio.get_running_loop().time() + 0.01
    await waiting.wait(None, deadline=deadline)
    assert not len(queue)
    queue.enter(waiting, None)
    await urgent.wait(None, deadline=deadline)
    assert queue.places == [waiting]
    with pytest.raises(NoCapacity, match="no turn came in time"):
        await late.wait(None, deadline=deadline)
    assert queue.places == [waiting, late]  # until its `with` ends
    queue.leave(late)
    queue.leave(late)
    assert queue.places == [waiting]
