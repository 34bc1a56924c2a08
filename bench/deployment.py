"""A deployment to measure: `microserve up`, from when it is ready until it is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

__all__ = ["Deployment", "cpu_s", "deployed", "machine_cpu_s"]

TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Deployment:
    """A router and its engines."""

    url: str
    admin_key: str
    pids: list[int]  # of the router, then of the engines
    engines: list[str]  # their URLs

    def use(self, strategy: str, **params: object) -> None:
        """Make it the strategy of all that is asked from now on: a new generation."""
        headers = {"Authorization": f"Bearer {self.admin_key}"} if self.admin_key else {}
        body = {"name": strategy, "params": params}
        reply = httpx.put(f"{self.url}/admin/strategy", json=body, headers=headers, timeout=30)
        reply.raise_for_status()

    def cpu_s(self) -> float:
        """CPU seconds of its processes, and of this one, so far."""
        return sum(map(cpu_s, [*self.pids, os.getpid()]))


@contextmanager
def deployed(*arguments: str) -> Iterator[Deployment]:
    """`microserve up ARGUMENTS…`, on free ports. SIGTERM ends it as well."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory() as folder:
        state_file = Path(folder) / "state.json"
        command = [sys.executable, "-m", "router", "up", *arguments, "--port", "0"]
        up = subprocess.Popen([*command, "--state-file", str(state_file)], stdout=sys.stderr)
        try:
            while not state_file.exists():
                if up.poll() is not None:
                    raise SystemExit(f"`microserve up` ended with {up.returncode}")
                time.sleep(0.1)
            state = json.loads(state_file.read_text())
            parts = [state["router"], *state["engines"]]
            yield Deployment(
                state["router"]["url"],
                state["admin_key"],
                [part["pid"] for part in parts],
                [engine["url"] for engine in state["engines"]],
            )
        finally:
            up.terminate()
            up.wait()


def machine_cpu_s() -> float:
    """CPU seconds that all processes of this machine have taken, so far."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    user, nice, system, _, _, irq, softirq = map(int, fields[:7])
    return (user + nice + system + irq + softirq) / TICKS


def cpu_s(pid: int) -> float:
    """CPU seconds of a process, user and system, so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS
