"""Servers that a bench starts, stops between its measurements, and ends."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

__all__ = [
    "cpu_s",
    "free_port",
    "machine_cpu_s",
    "running",
    "stopped_server",
    "tree_cpu_s",
    "tree_cpus_s",
    "tree_rss_mb",
    "wait_until_healthy",
]

TICKS = os.sysconf("SC_CLK_TCK")


def free_port() -> int:
    """Return a TCP port that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def wait_until_healthy(url: str, process: subprocess.Popen[bytes], within_s: float) -> None:
    """Wait until `/health` answers. Raises `SystemExit` if the process ends or time is up."""
    give_up = time.monotonic() + within_s
    while True:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            if process.poll() is not None or time.monotonic() > give_up:
                raise SystemExit(f"{url} does not answer") from None
            time.sleep(0.1)


@contextmanager
def stopped_server(
    command: Sequence[str], url: str, *, env: Mapping[str, str], within_s: float
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a server in a process group of its own, and stop it as soon as it answers.

    `running` lets it run. It is killed on exit.
    """
    with tempfile.TemporaryFile() as log, subprocess.Popen(
        command, stdout=log, stderr=log, env=env, start_new_session=True
    ) as process:  # fmt: skip
        try:
            wait_until_healthy(url, process, within_s)
            os.killpg(process.pid, signal.SIGSTOP)
            yield process
        finally:
            os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def running(*servers: subprocess.Popen[bytes]) -> Iterator[None]:
    """Let the process groups of these servers run during the body, and stop them afterwards."""
    for server in servers:
        os.killpg(server.pid, signal.SIGCONT)
    try:
        yield
    finally:
        for server in servers:
            os.killpg(server.pid, signal.SIGSTOP)


def machine_cpu_s() -> float:
    """Return the CPU seconds used so far by all processes of this machine."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    user, nice, system, _, _, irq, softirq = map(int, fields[:7])
    return (user + nice + system + irq + softirq) / TICKS


def cpu_s(pid: int) -> float:
    """Return the CPU seconds used so far by a process, user and system."""
    return sum(map(int, _stat(pid)[11:13])) / TICKS


def tree_cpus_s(pid: int) -> dict[int, float]:
    """Return user and system seconds so far of a process and of each descendant, by pid."""
    return {each: cpu_s(each) for each in _tree(pid)}


def tree_cpu_s(pid: int) -> float:
    """Return user and system seconds so far of a process, its descendants and ended children.

    The kernel counts ticks of 10 ms usually, so measure over a second of CPU at least.
    """
    return sum(sum(int(ticks) for ticks in _stat(each)[11:15]) / TICKS for each in _tree(pid))


def tree_rss_mb(pid: int) -> float:
    """Return resident memory in MB (10⁶ bytes). A shared page counts for each process."""
    pages = sum(int(_stat(each)[21]) for each in _tree(pid))
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def _tree(pid: int) -> list[int]:
    """Return a process and its descendants."""
    children = [
        int(child)
        for task in Path(f"/proc/{pid}/task").iterdir()
        for child in (task / "children").read_text().split()
    ]
    return [pid, *(below for child in children for below in _tree(child))]


def _stat(pid: int) -> list[str]:
    """Return the fields of `/proc/PID/stat` from the third on, so that `[n]` is field n + 3.

    Fields 14 to 17 are utime, stime, cutime and cstime.
    """
    text = Path(f"/proc/{pid}/stat").read_text()
    return re.split(r"\) ", text, maxsplit=1)[1].split()
