"""The rules of Chrome's trace event format, as strictly as Perfetto's importer has them."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ARGS = {"process_name": "name", "thread_name": "name"}


@dataclass
class TraceFile:
    """A file that keeps the rules. Times are microseconds."""

    about: dict[str, Any]
    processes: dict[int, str] = field(default_factory=dict)
    threads: dict[tuple[int, int], str] = field(default_factory=dict)
    slices: list[dict[str, Any]] = field(default_factory=list)
    flows: dict[int, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))

    def of(self, process: str, track: str) -> list[dict[str, Any]]:
        """Return the slices of all lanes of a track, in the order of their begins."""
        found = [
            one
            for one in self.slices
            if self.processes[one["pid"]] == process
            and self.threads[one["pid"], one["tid"]].rstrip(" 0123456789") == track
        ]
        return sorted(found, key=lambda one: one["ts"])

    def joined(self, flow: int) -> list[dict[str, Any]]:
        """Return the innermost slices that a flow connects."""
        return [self.around(point) for point in self.flows[flow]]

    def around(self, point: dict[str, Any]) -> dict[str, Any]:
        inside = [
            one
            for one in self.slices
            if (one["pid"], one["tid"]) == (point["pid"], point["tid"])
            and one["ts"] <= point["ts"] < one["ts"] + one["dur"]
        ]
        assert inside, f"no slice is around {point}"
        return min(inside, key=lambda one: one["dur"])


def read_trace(content: bytes | Path) -> TraceFile:
    """Read a file and check it; every broken rule is an `AssertionError`."""
    data = content.read_bytes() if isinstance(content, Path) else content
    document = json.loads(data, parse_constant=lambda name: 1 / 0)
    assert set(document) == {"displayTimeUnit", "otherData", "traceEvents"}
    assert document["displayTimeUnit"] == "ms"
    file = TraceFile(document["otherData"])
    for event in document["traceEvents"]:
        _check_fields(event)
        kind, thread = event["ph"], (event["pid"], event["tid"])
        if event["name"] == "process_name":
            assert event["pid"] not in file.processes
            file.processes[event["pid"]] = event["args"]["name"]
        elif event["name"] == "thread_name" and kind == "M":
            assert thread not in file.threads
            file.threads[thread] = event["args"]["name"]
        elif kind == "X":
            file.slices.append(event)
        elif kind in "stf":
            file.flows[event["id"]].append(event)
    tids = [tid for _, tid in file.threads]
    assert len(set(tids)) == len(tids), "Perfetto joins threads of one number"
    assert {pid for pid, _ in file.threads} <= set(file.processes)
    for one in file.slices:
        assert (one["pid"], one["tid"]) in file.threads
    _check_nesting(file)
    for points in file.flows.values():
        kinds = "".join(point["ph"] for point in points)
        assert kinds == "s" + "t" * (len(points) - 2) + "f", kinds
        times = [point["ts"] for point in points]
        assert times == sorted(times)
        for point in points:
            file.around(point)
    return file


def _check_fields(event: dict[str, Any]) -> None:
    assert isinstance(event["name"], str) and event["name"]
    assert event["ph"] in ("X", "M", "s", "t", "f"), event
    for number in ("pid", "tid"):
        assert type(event[number]) is int and event[number] >= 0
    assert event["pid"] > 0, "0 is the idle process"
    assert _time(event["ts"]) >= 0
    if event["ph"] == "M":
        assert event["name"] in (
            "process_name", "process_sort_index", "thread_name", "thread_sort_index",
        )  # fmt: skip
        (value,) = event["args"].values()
        assert isinstance(value, str if event["name"] in ARGS else int)
        return
    assert event["tid"] > 0 and event["cat"]
    if event["ph"] == "X":
        assert _time(event["dur"]) > 0 and isinstance(event["args"], dict)
    else:
        assert type(event["id"]) is int
        assert event.get("bp") == (None if event["ph"] == "s" else "e")


def _time(value: object) -> float:
    assert isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return value


def _check_nesting(file: TraceFile) -> None:
    """Slices of a thread are inside each other or apart: Perfetto drops what overlaps."""
    threads = defaultdict(list)
    for one in file.slices:
        begin = round(one["ts"] * 1e3)
        threads[one["tid"]].append((begin, begin + round(one["dur"] * 1e3)))
    for slices in threads.values():
        open_: list[int] = []
        for begin, end in sorted(slices, key=lambda one: (one[0], -one[1])):
            while open_ and open_[-1] <= begin:
                open_.pop()
            assert not open_ or end <= open_[-1], "slices of a thread overlap"
            open_.append(end)
