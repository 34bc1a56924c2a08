"""Limits of the process that runs an uploaded module, and the end of all that it has started."""

from __future__ import annotations

import os
import resource
import signal
import time
from contextlib import suppress
from pathlib import Path

__all__ = ["end_descendants", "limit_resources"]

MEMORY_BYTES = 4 << 30  # address space of each process
FILE_BYTES = 16 << 20  # size of each file that it writes
PROCESSES = 64  # processes and threads, beyond those that the user has


def limit_resources(cpu_s: float) -> None:
    """Limit this process and its children: memory, CPU seconds, size of files, processes.

    The kernel does not limit the number of the superuser's processes.
    """
    for what, limit in (
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_CPU, max(1, round(cpu_s))),
        (resource.RLIMIT_FSIZE, FILE_BYTES),
        (resource.RLIMIT_NPROC, _tasks_of(os.getuid()) + PROCESSES),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(what)
        least = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(what, (least, least))


def end_descendants(within_s: float) -> bool:
    """Kill and reap the children of this process and their descendants, for `within_s` at most.

    Descendants that have left their session or lost their parent are found if this process adopts
    orphans. Return whether none is left.
    """
    give_up = time.monotonic() + within_s
    while True:
        _reap()
        living = _descendants(os.getpid())
        if not living:
            return True
        if time.monotonic() > give_up:
            return False
        for pid in living:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)  # the kernel ends them


def _reap() -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _descendants(root: int) -> list[int]:
    """Return the living descendants of a process."""
    children: dict[int, list[int]] = {}
    for pid, fields in _stats():
        if fields[0] not in "ZX":
            children.setdefault(int(fields[1]), []).append(pid)
    found, left = [], [root]
    while left:
        more = children.pop(left.pop(), [])
        found += more
        left += more
    return found


def _tasks_of(uid: int) -> int:
    """Return how many processes and threads a user has."""
    tasks = 0
    for pid, fields in _stats():
        with suppress(OSError):
            if Path(f"/proc/{pid}").stat().st_uid == uid:
                tasks += int(fields[17])
    return tasks


def _stats() -> list[tuple[int, list[str]]]:
    """Return each process with the fields of its `/proc/PID/stat` from the third on."""
    found = []
    for name in os.listdir("/proc"):  # noqa: PTH208  names are enough
        if name.isdecimal():
            with suppress(OSError):  # it has ended
                text = Path(f"/proc/{name}/stat").read_text()
                found.append((int(name), text.rpartition(")")[2].split()))
    return found
