"""Ends the processes that a test process leaves behind, however that ends; measures their memory.

`start` runs a small process beside the test process. When the test process has ended, also by
SIGKILL, the small one kills all processes that have the test process's mark in their environment:
the children, and theirs, in whatever session they are. While it waits, it can measure how much
memory they take together with the test process.
"""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from pathlib import Path

__all__ = ["Reaper"]

MARK = "TESTS_OWNER"
SAMPLE_S = 15.0  # each takes a quarter of a second of CPU
QUIET_S = 10.0  # no process with the mark may appear within it, at most
PSS = re.compile(rb"^Pss:\s+(\d+) kB", re.M)


class Reaper:
    """The small process, seen from the test process."""

    def __init__(self, *, measures: bool) -> None:
        """Start it. Processes that start from now on carry the mark."""
        mark = uuid.uuid4().hex
        environment = {name: value for name, value in os.environ.items() if name != MARK}
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-E", __file__, mark, str(os.getpid()), str(int(measures))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        os.environ[MARK] = mark

    def peak_bytes(self) -> int:
        """Return the most memory seen, as proportional set sizes. Ends the measurement."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(b"?")
            self._process.stdin.flush()
        return int(self._process.stdout.readline() or 0)


def marked(mark: str) -> list[int]:
    """Return the living processes with the mark in their environment."""
    wanted, found = f"{MARK}={mark}".encode(), []
    for name in os.listdir("/proc"):  # noqa: PTH208  names are enough
        if name.isdecimal():
            with suppress(OSError):
                if wanted in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                    found.append(int(name))
    return found


def kill_all(mark: str) -> None:
    """Kill marked processes until there are none."""
    give_up = time.monotonic() + QUIET_S
    while (left := marked(mark)) and time.monotonic() < give_up:
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def descendants(root: int) -> set[int]:
    """Return a process and all that descend from it."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208  names are enough
        if name.isdecimal():
            with suppress(OSError):
                stat = Path(f"/proc/{name}/stat").read_text()
                children.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(name))
    found, left = {root}, [root]
    while left:
        more = children.pop(left.pop(), [])
        found.update(more)
        left += more
    return found


def memory_of(pids: set[int]) -> int:
    """Return the sum of proportional set sizes, in bytes: shared pages count once."""
    total = 0
    for pid in pids:
        with suppress(OSError):
            if size := PSS.search(Path(f"/proc/{pid}/smaps_rollup").read_bytes()):
                total += int(size[1]) << 10
    return total


def main(mark: str, owner: int, *, measures: bool) -> None:
    """Run in the small process."""
    peak = 0
    while True:
        ready, _, _ = select.select([0], [], [], SAMPLE_S if measures else None)
        if ready and not os.read(0, 1):
            break
        if measures:
            peak = max(peak, memory_of(descendants(owner) | set(marked(mark))))
        if ready:
            os.write(1, b"%d\n" % peak)
    kill_all(mark)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), measures=sys.argv[3] == "1")
