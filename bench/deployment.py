"""Runs `microserve up` for a measurement."""

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

from bench.processes import cpu_s

__all__ = ["Deployment", "deployed"]


@dataclass(frozen=True, slots=True)
class Deployment:
    """A router and its engines."""

    url: str
    admin_key: str
    pids: list[int]  # of the router, then of the engines
    engines: list[str]  # their URLs
    engine_key: str  # that they ask for

    def use(self, strategy: str, **params: object) -> None:
        """Activate a strategy for further requests, as a new generation."""
        headers = {"Authorization": f"Bearer {self.admin_key}"} if self.admin_key else {}
        body = {"name": strategy, "params": params}
        reply = httpx.put(f"{self.url}/admin/strategy", json=body, headers=headers, timeout=30)
        reply.raise_for_status()

    def cpu_s(self) -> float:
        """Return the CPU seconds used so far by its processes and this one."""
        return sum(map(cpu_s, [*self.pids, os.getpid()]))


@contextmanager
def deployed(*arguments: str, python: str = sys.executable) -> Iterator[Deployment]:
    """Run `microserve up ARGUMENTS…` on free ports. SIGTERM to this process ends it too.

    `python` is the interpreter of another environment that has this project. The arguments must
    not end in those of vLLM.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory() as folder:
        state_file = Path(folder) / "state.json"
        command = [python, "-m", "router", "up", *arguments, "--port", "0"]
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
                state["engine_api_key"],
            )
        finally:
            up.terminate()
            up.wait()
