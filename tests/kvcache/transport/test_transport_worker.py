from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest
from kv_helpers import Clock, memory_cache

from kvcache.errors import Internal
from kvcache.transport import MemoryNetwork
from kvcache.transport.worker import Worker, _TaskLoop

WAIT_S = 20.0


def test_a_waiting_task_lets_others_run():
    worker, order, may = Worker("test"), [], threading.Event()

    def waits() -> float | None:
        if not may.is_set():
            return 0.001
        order.append("first")
        return None

    def goes() -> None:
        order.append("second")
        may.set()

    worker.submit(waits)
    worker.submit(goes)
    worker.close()
    assert order == ["second", "first"]


def test_tasks_alternate():
    worker, order, begin = Worker("test"), [], threading.Event()

    def task(name: str) -> None:
        left = [0, 1, 2]

        def turn() -> float | None:
            order.append(name)
            left.pop()
            return 0.0 if left else None

        worker.submit(turn)

    worker.submit(lambda: begin.wait(WAIT_S) and None)  # both are there before either begins
    task("a")
    task("b")
    begin.set()
    worker.close()
    assert order == ["a", "b"] * 3


def test_the_worker_sleeps_while_a_task_waits():
    worker, turns, done = Worker("test"), [], threading.Event()

    def waits() -> float | None:
        turns.append(None)
        if len(turns) == 1:
            return 0.2
        done.set()
        return None

    worker.submit(waits)
    assert done.wait(WAIT_S)
    assert len(turns) == 2
    worker.close()


def test_a_task_that_raises_ends_alone(caplog: pytest.LogCaptureFixture):
    worker, done = Worker("test"), threading.Event()
    worker.submit(lambda: 1 / 0)
    worker.submit(lambda: done.set())
    assert done.wait(WAIT_S)
    worker.close()
    assert "ZeroDivisionError" in caplog.text


def test_a_closed_worker_accepts_nothing():
    worker = Worker("test")
    worker.close()
    with pytest.raises(Internal):
        worker.submit(lambda: None)
    worker.close()


def test_the_thread_ends_with_its_worker():
    worker, done = Worker("test"), threading.Event()
    worker.submit(lambda: done.set())
    assert done.wait(WAIT_S)
    thread, gone = worker._thread, weakref.ref(worker)
    del worker
    gc.collect()
    assert gone() is None
    thread.join(WAIT_S)
    assert not thread.is_alive()


def test_a_put_fails_after_its_transport_has_closed():
    network = MemoryNetwork()
    sender, receiver = memory_cache(network, name="a"), memory_cache(network, name="b")
    _, address = receiver.prep_recv("r", [1, 2, 3, 4], 4, 0, 60.0)
    put = sender.open_put(address, [1, 2, 3, 4], 0, 4)
    sender.close()
    for _ in range(2):
        with pytest.raises(Internal, match="closed"):
            put.close().result(10)
    receiver.close()


def test_tasks_may_submit_others_until_the_last_has_ended():
    worker, order, closing = Worker("test"), [], threading.Event()

    def first() -> None:
        assert closing.wait(WAIT_S)
        worker.submit(lambda: order.append("second"))
        order.append("first")

    worker.submit(first)
    with ThreadPoolExecutor(1) as threads:
        closed = threads.submit(worker.close)
        while not worker._loop._ended:
            closing.wait(0.001)
        assert not closed.done()
        closing.set()
        closed.result(WAIT_S)
    assert order == ["first", "second"]


def test_a_finished_task_is_not_kept():
    """Its put holds pages."""
    worker, ran = Worker("test"), threading.Event()

    class Task:
        def __call__(self) -> None:
            ran.set()

    task = Task()
    gone = weakref.ref(task)
    worker.submit(task)
    del task
    assert ran.wait(WAIT_S)
    for _ in range(1000):
        if gone() is None:
            break
        time.sleep(0.002)
    assert gone() is None
    worker.close()


def test_the_thread_does_not_keep_its_process_alive():
    worker = Worker("puts of a test")
    assert worker._thread.daemon and worker._thread.name == "puts of a test"
    worker.close()


# The loop alone, in the test's thread and time


class Sleep:
    """The condition of a loop: a wait takes no time, and counts on the clock of the test."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.waits: list[float] = []
        self.then: Callable[[], None] = lambda: None

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def notify(self) -> None:
        pass

    def wait(self, timeout: float | None) -> None:
        assert timeout is not None and timeout > 0, "nothing would wake the thread"
        self.waits.append(timeout)
        self.clock.now += timeout
        self.then()


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> tuple[_TaskLoop, Sleep]:
    """A loop that is about to end: `run` returns after the last task."""
    clock = Clock()
    monkeypatch.setattr("kvcache.transport.worker.time", SimpleNamespace(monotonic=clock))
    loop, sleep = _TaskLoop(), Sleep(clock)
    loop._change = cast(Any, sleep)
    return loop, sleep


def test_each_task_is_called_when_it_is_due(loop: tuple[_TaskLoop, Sleep]):
    tasks, sleep = loop
    calls: list[tuple[str, float]] = []

    def add(name: str, *delays: float) -> None:
        left = iter(delays)

        def task() -> float | None:
            calls.append((name, sleep.clock.now - 1000))
            return next(left, None)

        tasks.add(task)

    add("long", 30.0)
    add("steps", 1.0, 2.0, 0.0, 4.0)
    add("same", 1.0)
    tasks.end()
    tasks.run()
    assert calls == [
        ("long", 0), ("steps", 0), ("same", 0), ("steps", 1), ("same", 1), ("steps", 3),
        ("steps", 3), ("steps", 7), ("long", 30),
    ]  # fmt: skip
    assert sleep.waits == [1, 2, 4, 23]


def test_a_task_that_goes_on_at_once_is_behind_those_that_are_ready(loop: tuple[_TaskLoop, Sleep]):
    tasks, sleep = loop
    calls: list[str] = []

    def again() -> float | None:
        calls.append("again")
        sleep.clock.now += 1
        return 0.0 if len(calls) < 4 else None

    def late() -> float | None:
        calls.append("late")
        return 0.5 if calls == ["late"] else None

    tasks.add(late)
    tasks.add(again)
    tasks.end()
    tasks.run()
    assert calls == ["late", "again", "again", "late", "again"]
    assert not sleep.waits


def test_an_ending_loop_accepts_tasks_until_the_last_has_ended(loop: tuple[_TaskLoop, Sleep]):
    tasks, sleep = loop
    calls: list[str] = []

    def add(name: str) -> None:
        tasks.add(lambda: calls.append(name))

    def waits() -> float | None:
        calls.append("waits")
        add("while it runs")
        sleep.then = lambda: add("while it waits")
        return 1.0 if len(calls) == 1 else None

    tasks.add(waits)
    tasks.end()
    add("while it is ready")
    tasks.run()
    assert calls == [
        "waits", "while it is ready", "while it runs", "while it waits", "waits", "while it runs",
    ]  # fmt: skip
    with pytest.raises(Internal, match="closed"):
        add("afterwards")


def test_an_idle_loop_that_ends_calls_nothing(loop: tuple[_TaskLoop, Sleep]):
    tasks, sleep = loop
    tasks.end()
    with pytest.raises(Internal):
        tasks.add(pytest.fail)
    tasks.run()
    assert not sleep.waits
