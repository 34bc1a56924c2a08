"""The memory that this process may use: the machine's, within the limits of its control groups.

A container is a control group. `/proc/meminfo` shows the machine's memory in it, and the kernel
kills a process that uses more than the group's limit. In both versions of control groups, the
limits of all groups on the path to the root apply:

- version 2: `memory.max`, and `memory.current` for the use;
- version 1: `memory.limit_in_bytes` and `memory.usage_in_bytes`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

__all__ = ["Memory", "read_memory"]


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory in bytes. `source` says what limits it, for messages."""

    limit: int  # of this process and all others within the same limit
    available: int  # not in use, or in caches that the kernel can drop
    source: str = "the machine"


class _Files(NamedTuple):
    """The names of a control group's files, and the field of `memory.stat` with idle cache."""

    limit: str
    use: str
    idle: str


V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = _Files("memory.max", "memory.current", "inactive_file")


def read_memory(root: Path = Path("/")) -> Memory:
    """Return the memory that this process may use. `root` is the root of the file system."""
    total, available = _machine(root)
    memory = Memory(total, available)
    for group, files in _groups(root):
        with suppress(OSError, ValueError):  # the files are missing, or the limit is "max"
            limit = int((group / files.limit).read_text())
            used = int((group / files.use).read_text()) - _field(group / "memory.stat", files.idle)
            left = max(limit - max(used, 0), 0)
            if limit < memory.limit:
                source = f"the control group /{group.relative_to(root)}"
                memory = Memory(limit, min(memory.available, left), source)
            else:
                memory = replace(memory, available=min(memory.available, left))
    return memory


def _machine(root: Path) -> tuple[int, int]:
    """Return the machine's memory, and what is available of it."""
    info = root / "proc/meminfo"
    total = _field(info, "MemTotal:") << 10
    if not total:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return total, _field(info, "MemAvailable:") << 10 or total


def _groups(root: Path) -> Iterator[tuple[Path, _Files]]:
    """Yield the folders of this process's control groups for memory, up to the root group."""
    try:
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    paths: dict[_Files, str] = {}
    for line in groups:  # hierarchy:controllers:path
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            paths[V2] = path
        elif "memory" in controllers.split(","):
            paths[V1] = path
    for line in mounts:  # id parent device root mountpoint options [optional…] - kind from options
        left, _, right = line.partition(" - ")
        before, after = left.split(), right.split()
        if len(before) < 5 or len(after) < 3:
            continue
        kind, options = after[0], after[2].split(",")
        files = (
            V2 if kind == "cgroup2" else V1 if kind == "cgroup" and "memory" in options else None
        )
        if files is None or files not in paths:
            continue
        top = root / _unescape(before[4]).lstrip("/")
        group = top / _below(paths[files], _unescape(before[3]))
        while group.is_relative_to(top):
            yield group, files
            group = group.parent


def _below(path: str, mounted: str) -> str:
    """Return a group's path relative to the group that is mounted.

    Where the group is not below the mounted one, as in some containers, that is the mounted one.
    """
    inside = path.rstrip("/") + "/"
    if ".." in path.split("/") or not inside.startswith(mounted.rstrip("/") + "/"):
        return ""
    return path[len(mounted.rstrip("/")) :].strip("/")


def _unescape(text: str) -> str:
    """Decode the octal escapes of `/proc/self/mountinfo`."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _field(path: Path, name: str) -> int:
    """Return the number behind `name` in a file with a name and a number per line; 0 without."""
    with suppress(OSError, ValueError, IndexError):
        for line in path.read_text().splitlines():
            words = line.split()
            if words and words[0] == name:
                return int(words[1])
    return 0
