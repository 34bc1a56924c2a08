"""A keeper keeps its process running, and ends it."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from pathlib import Path

import pytest
from waiting import until

from router.base import child_environment
from router.ray_fleet.keeper import Keeper, Snapshot

SERVER = """
import socket, sys, time
listener = socket.create_server(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])))
print(f"engine e ready http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
time.sleep(600)
"""

pytestmark = [pytest.mark.processes]


def keeper(argv: list[str], said: list[str], **changes) -> Keeper:
    return Keeper(
        "engine-0",
        argv,
        child_environment(),
        host="127.0.0.1",
        say=said.append,
        grace_s=5,
        **changes,
    )


def server() -> list[str]:
    """Return the command of a server that starts at once, and is announced as an engine is."""
    return [sys.executable, "-S", "-c", SERVER, "--port", "0"]


def running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


async def ready(one: Keeper, since: Snapshot | None = None) -> Snapshot:
    await until(
        lambda: (
            one.snapshot().state == "ready" and (since is None or one.snapshot().pid != since.pid)
        ),
        timeout=60,
    )
    return one.snapshot()


async def test_it_restarts_on_the_same_port_and_stops():
    said: list[str] = []
    one = keeper(server(), said)
    one.start()
    try:
        first = await ready(one)
        os.kill(first.pid, signal.SIGKILL)
        second = await ready(one, first)
        assert second.url == first.url
        assert (second.restarts, second.problem) == (1, "signal 9")
        socket.create_connection(("127.0.0.1", int(second.url.rpartition(":")[2]))).close()
    finally:
        one.stop()
    assert one.snapshot().state == "stopped"
    assert not running(second.pid)
    assert any("restarting in 0.2 s" in line for line in said)


async def test_it_takes_another_port_if_its_own_is_taken():
    with socket.socket() as thief:
        thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)

        def steal() -> None:  # between two processes
            thief.bind(("127.0.0.1", int(one.snapshot().url.rpartition(":")[2])))
            thief.listen()

        one = keeper(server(), [], restarted=steal)
        one.start()
        try:
            first = await ready(one)
            os.kill(first.pid, signal.SIGKILL)
            second = await ready(one, first)
            assert second.url != first.url
        finally:
            one.stop()


async def test_a_start_that_fails_is_told_and_tried_again():
    one = keeper([sys.executable, "-c", "import sys; sys.exit('no weights')", "--port", "0"], [])
    one.start()
    try:
        await until(lambda: one.snapshot().failed_starts > 1, timeout=60)
        assert "no weights" in one.snapshot().problem
    finally:
        one.stop()


async def test_without_respawn_it_ends():
    one = keeper([sys.executable, "-c", "pass", "--port", "0"], [], respawn=False)
    one.start()
    await until(lambda: one.snapshot().state == "ended", timeout=30)
    one.stop()
    assert one.snapshot().restarts == 0


def test_it_can_be_stopped_before_it_has_begun():
    began = threading.Event()

    def before(stopping: threading.Event) -> None:
        began.set()
        stopping.wait()

    one = keeper(server(), [], before=before)
    one.start()
    began.wait()
    one.stop()
    assert one.snapshot() == Snapshot("stopped")
