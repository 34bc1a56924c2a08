"""How long `up` waits for the end of a child."""

from __future__ import annotations

import asyncio
import sys

import pytest

from router.supervisor import Fleet, FleetConfig, child_process, fleet

CHILD = """
import signal, time

signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
print("router ready http://127.0.0.1:1", flush=True)
signal.sigwait({signal.SIGTERM})
time.sleep(1.5)
print("ended in order", flush=True)
"""


@pytest.mark.processes
@pytest.mark.parametrize("shutdown_s", [20.0, 0.0])
async def test_the_router_has_the_time_of_its_shutdown_to_end(monkeypatch, shutdown_s):
    command = [sys.executable, "-I", "-S", "-c", CHILD]
    monkeypatch.setattr(fleet, "module_command", lambda *_: command)
    for module in (fleet, child_process):
        monkeypatch.setattr(module, "GRACE_S", 0.05)
    said: list[str] = []
    config = FleetConfig(
        model="mock",
        pools=(),
        router_args=(),
        host="127.0.0.1",
        port=0,
        shutdown_s=shutdown_s,
    )
    up = Fleet(config, say=said.append, note=said.append)
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        await up._start(tasks)
        await up._stop()
    assert ("router | ended in order" in said) is bool(shutdown_s)
