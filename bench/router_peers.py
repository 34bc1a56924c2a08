"""The processes of a router bench: mock engines, and the routers in front of them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.processes import free_port, tree_cpu_s, tree_rss_mb, wait_until_healthy

__all__ = ["Deployment", "Process", "deployed"]

VLLM_ROUTER = Path(__file__).parent.parent / ".peers" / "vllm-router" / "bin" / "vllm-router"
START_S = 60.0


@dataclass(frozen=True, slots=True)
class Process:
    """A server. CPU and memory include all its child processes."""

    url: str
    pid: int

    def cpu_s(self) -> float:
        """Return user and system seconds so far, including children that have ended."""
        return tree_cpu_s(self.pid)

    def rss_mb(self) -> float:
        """Return resident memory in MB (10⁶ bytes). A shared page counts for each process."""
        return tree_rss_mb(self.pid)


@dataclass(frozen=True, slots=True)
class Deployment:
    """Engines behind our router and behind the peer's. `theirs` is None if not installed."""

    engines: list[Process]
    ours: Process
    theirs: Process | None


@contextmanager
def deployed(
    *engine_flags: str, engines: int = 2, peer: bool = True, router_flags: Sequence[str] = ()
) -> Iterator[Deployment]:
    """Start everything, and stop it on exit. `router_flags` are for our router."""
    with ExitStack() as stack:
        python = [sys.executable, "-m"]
        orphan = ["--parent-pid", str(os.getpid())]  # ends with this process
        flags = ["mock", "--port", "0", "--threads", "1", *orphan, *engine_flags]
        workers = [
            stack.enter_context(_started([*python, "engine", *flags])) for _ in range(engines)
        ]
        urls = [worker.url for worker in workers]
        ours = [*python, "router", "router", "--port", "0", *orphan, *router_flags]
        for url in urls:
            ours += ["--engine", url]
        theirs = None
        if peer and VLLM_ROUTER.exists():
            port = free_port()
            command = [
                str(VLLM_ROUTER), "--host", "127.0.0.1", "--port", str(port), "--worker-urls",
                *urls, "--policy", "round_robin", "--log-level", "error",
                "--prometheus-port", str(free_port()),
            ]  # fmt: skip
            theirs = stack.enter_context(_started(command, url=f"http://127.0.0.1:{port}"))
        yield Deployment(workers, stack.enter_context(_started(ours)), theirs)


@contextmanager
def _started(command: Sequence[str], url: str = "") -> Iterator[Process]:
    """Start a server, and stop it on exit.

    Without `url`, the server prints its URL at the end of its first line.
    """
    output = subprocess.DEVNULL if url else subprocess.PIPE
    process = subprocess.Popen(command, stdout=output, stderr=subprocess.DEVNULL if url else None)
    try:
        if process.stdout is not None:
            line = process.stdout.readline().decode()
            if not line:
                raise SystemExit(f"{command} has ended with {process.wait()}")
            url = line.split()[-1]
        wait_until_healthy(url, process, START_S)
        yield Process(url, process.pid)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()
