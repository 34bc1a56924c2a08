"""User code in threads: what happens past the deadline."""

from __future__ import annotations

import asyncio
import sys
import threading

import pytest
from waiting import until

from engine.protocol import Timeout
from router.base.errors import Conflict, StrategyError
from router.rollout.catalog import Catalog
from router.supervision.user_threads import UserThreads

SPINS = "while True: pass\n"
CATCHES = """
import threading
go_on = threading.go_on
while not go_on.wait(0.001):
    try:
        while not go_on.wait(0.001): pass
    except BaseException:
        pass
"""
GOOD = "from router import strategy\n@strategy\nasync def mine(request, cluster):\n    yield\n"


async def test_results_and_errors_pass():
    threads = UserThreads()
    name = await threads.run("t", lambda: threading.current_thread().name, limit_s=5)
    assert name == "t"
    with pytest.raises(ZeroDivisionError):
        await threads.run("t", lambda: 1 // 0, limit_s=5)

    def stops() -> None:
        raise KeyboardInterrupt

    with pytest.raises(StrategyError, match="t: KeyboardInterrupt"):
        await threads.run("t", stops, limit_s=5)
    assert not threads.late


async def test_a_module_that_spins_is_interrupted(catalog: Catalog):
    before = set(sys.modules)
    with pytest.raises(Timeout, match=r"mine\.py: loading took more than 0\.05 s"):
        await catalog.load_in_thread(SPINS, file="mine.py", limit_s=0.05)
    await until(lambda: not catalog._threads.late)
    assert not [name for name in set(sys.modules) - before if name.startswith("microserve_")]
    assert (await catalog.load_in_thread(GOOD, file="mine.py", limit_s=5)).name == "mine"


async def test_uploads_are_refused_while_one_cannot_be_stopped(catalog: Catalog, monkeypatch):
    """Its thread is a daemon, so that the process can end."""
    go_on = threading.Event()
    monkeypatch.setattr(threading, "go_on", go_on, raising=False)
    try:
        with pytest.raises(Timeout):
            await catalog.load_in_thread(CATCHES, file="mine.py", limit_s=0.05)
        (thread,) = catalog._threads._late
        assert thread.daemon
        with pytest.raises(Conflict, match="restart the router"):
            await catalog.load_in_thread(GOOD, file="mine.py", limit_s=5)
    finally:
        go_on.set()
    await until(lambda: not catalog._threads.late)
    assert (await catalog.load_in_thread(GOOD, file="mine.py", limit_s=5)).name == "mine"


async def test_a_cancelled_load_is_interrupted(catalog: Catalog):
    loading = asyncio.create_task(catalog.load_in_thread(SPINS, file="mine.py", limit_s=60))
    await until(lambda: any(t.name == "import of mine.py" for t in threading.enumerate()))
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    await until(lambda: not catalog._threads.late)
