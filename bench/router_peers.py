"""The processes of a router bench: mock engines, and the routers in front of them."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Deployment", "Process", "deployed"]

VLLM_ROUTER = Path(__file__).parent.parent / ".peers" / "vllm-router" / "bin" / "vllm-router"
START_S = 60.0
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Process:
    """A server. CPU and memory include all its child processes."""

    url: str
    pid: int

    def cpu_s(self) -> float:
        """Return user and system seconds so far, including children that have ended.

        The kernel counts ticks of 10 ms usually, so measure over a second of CPU at least.
        """
        return sum(_cpu_s(pid) for pid in _tree(self.pid))

    def rss_mb(self) -> float:
        """Return resident memory in MB (10⁶ bytes). A shared page counts for each process."""
        pages = sum(int(_stat(pid)[21]) for pid in _tree(self.pid))
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


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
            port = _free_port()
            command = [
                str(VLLM_ROUTER), "--host", "127.0.0.1", "--port", str(port), "--worker-urls",
                *urls, "--policy", "round_robin", "--log-level", "error",
                "--prometheus-port", str(_free_port()),
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
        _wait_until_healthy(url, process)
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


def _wait_until_healthy(url: str, process: subprocess.Popen[bytes]) -> None:
    give_up = time.monotonic() + START_S
    while True:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            if process.poll() is not None or time.monotonic() > give_up:
                raise SystemExit(f"{url} does not answer") from None
            time.sleep(0.1)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _tree(pid: int) -> list[int]:
    """Return a process and its descendants."""
    children = [
        int(child)
        for task in Path(f"/proc/{pid}/task").iterdir()
        for child in (task / "children").read_text().split()
    ]
    return [pid, *(below for child in children for below in _tree(child))]


def _stat(pid: int) -> list[str]:
    """Return the fields of `/proc/PID/stat` from the third on, so that `[n]` is field n + 3."""
    text = Path(f"/proc/{pid}/stat").read_text()
    return re.split(r"\) ", text, maxsplit=1)[1].split()


def _cpu_s(pid: int) -> float:
    fields = _stat(pid)
    return sum(int(ticks) for ticks in fields[11:15]) / TICKS  # utime, stime, cutime, cstime
