from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
from kv_helpers import memory_cache

from kvcache.errors import Internal
from kvcache.transport import MemoryNetwork
from kvcache.transport.worker import Worker

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
