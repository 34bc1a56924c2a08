"""A time line as a file in Chrome's trace event format, for Perfetto and chrome://tracing.

A process of the file has tracks; a track has as many threads (lanes) as it has slices at a time,
since the slices of a thread must nest. A flow connects slices, as arrows from one to the next.
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

import orjson

__all__ = ["ChromeTrace", "Slice"]

SLACK_NS = 1000  # by which slices of one lane may seem to overlap, as sums of times are rounded
Event = dict[str, Any]


@dataclass(slots=True, eq=False)
class Slice:
    """An interval of a track, in nanoseconds. `inner` are parts of it, one after another."""

    name: str
    begin: int
    end: int
    about: Mapping[str, Any]
    inner: Sequence[Slice] = ()
    pid: int = 0
    tid: int = 0  # 0: not yet known


@dataclass(slots=True)
class _Track:
    name: str
    slices: list[Slice] = field(default_factory=list)


@dataclass(slots=True)
class _Process:
    name: str
    tracks: dict[str, _Track] = field(default_factory=dict)


class ChromeTrace:
    """Gathers slices and flows, and writes them. Times are seconds on any one clock."""

    def __init__(self) -> None:
        self._processes: list[_Process] = []
        self._flows: list[list[Slice]] = []

    def process(self, name: str, tracks: Sequence[str]) -> int:
        """Add a process with these tracks, in this order; return its number."""
        self._processes.append(_Process(name, {track: _Track(track) for track in tracks}))
        return len(self._processes)

    def slice(
        self,
        process: int,
        track: str,
        name: str,
        begin_s: float,
        seconds: float,
        about: Mapping[str, Any],
        inner: Iterable[tuple[str, float, float]] = (),
    ) -> Slice:
        """Add a slice. `inner` are names, begins and durations (s) of what it consists of."""
        new = _slice(name, begin_s, seconds, about)
        new.pid = process
        parts, at = [], new.begin
        for part_name, part_begin_s, part_s in inner:
            part = _slice(part_name, part_begin_s, part_s, {})
            part.begin = min(max(part.begin, at), new.end)
            at = part.end = min(max(part.end, part.begin), new.end)
            if part.end > part.begin:
                parts.append(part)
        new.inner = parts
        self._processes[process - 1].tracks[track].slices.append(new)
        return new

    def flow(self, slices: Iterable[Slice]) -> None:
        """Connect the begins of slices, in the order of their times, from the first one on.

        What begins before the first one is left out: an arrow cannot go back in time.
        """
        first, *rest = slices
        later = [one for one in rest if one.begin >= first.begin]
        if later:
            self._flows.append([first, *later])

    def pieces(self, about: Mapping[str, Any], events: int = 512) -> Iterator[bytes]:
        """Yield the file, about `events` events at a time. `about` goes into `otherData`."""
        batch: list[bytes] = []
        yield b'{"displayTimeUnit":"ms","otherData":%b,"traceEvents":[' % _json(about)
        separator = b""
        for event in self._events():
            batch.append(_json(event))
            if len(batch) == events:
                yield separator + b",\n".join(batch)
                batch.clear()
                separator = b",\n"
        yield (separator if batch else b"") + b",\n".join(batch) + b"]}\n"

    @property
    def origin_s(self) -> float:
        """The time that the file calls 0: that of the first slice, 0 without any."""
        return self._origin() / 1e9

    def _origin(self) -> int:
        return min((one.begin for one in self._all()), default=0)

    def _all(self) -> Iterator[Slice]:
        for process in self._processes:
            for track in process.tracks.values():
                yield from track.slices

    def _events(self) -> Iterator[Event]:
        origin, tids = self._origin(), 0
        for pid, process in enumerate(self._processes, start=1):
            yield _metadata("process_name", pid, 0, name=process.name)
            yield _metadata("process_sort_index", pid, 0, sort_index=pid)
            for track in process.tracks.values():
                lanes = _in_lanes(track.slices, tids + 1)
                for lane in range(lanes):
                    tids += 1
                    name = track.name if lanes == 1 else f"{track.name} {lane + 1}"
                    yield _metadata("thread_name", pid, tids, name=name)
                    yield _metadata("thread_sort_index", pid, tids, sort_index=tids)
                for one in track.slices:
                    yield _complete(one, pid, one.tid, origin)
                    for part in one.inner:
                        yield _complete(part, pid, one.tid, origin)
        # A reader looks for the slice around a flow's point, so slices come first.
        for number, (first, *later) in enumerate(self._flows, start=1):
            later.sort(key=_begin)
            yield _flow_point("s", number, first, origin)
            for one in later[:-1]:
                yield {**_flow_point("t", number, one, origin), "bp": "e"}
            yield {**_flow_point("f", number, later[-1], origin), "bp": "e"}


def _begin(one: Slice) -> int:
    return one.begin


def _slice(name: str, begin_s: float, seconds: float, about: Mapping[str, Any]) -> Slice:
    begin = round(begin_s * 1e9)
    return Slice(name, begin, max(round((begin_s + seconds) * 1e9), begin + 1), about)


def _in_lanes(slices: list[Slice], first_tid: int) -> int:
    """Sort slices and give each the first lane that is free; return the number of lanes, from 1."""
    slices.sort(key=lambda one: (one.begin, -one.end))
    free: list[int] = []
    running: list[tuple[int, int]] = []  # a heap: until when each lane is in use
    lanes = 0
    for one in slices:
        while running and running[0][0] <= one.begin + (0 if one.inner else SLACK_NS):
            ended, lane = heappop(running)
            if ended > one.begin:  # the same instant, but for rounding
                one.begin, one.end = ended, max(one.end, ended + 1)
            heappush(free, lane)
        if free:
            lane = heappop(free)
        else:
            lane, lanes = lanes, lanes + 1
        one.tid = first_tid + lane
        heappush(running, (one.end, lane))
    return max(lanes, 1)


def _complete(one: Slice, pid: int, tid: int, origin: int) -> Event:
    return {
        "name": one.name, "cat": "microserve", "ph": "X", "ts": (one.begin - origin) / 1e3,
        "dur": (one.end - one.begin) / 1e3, "pid": pid, "tid": tid, "args": one.about,
    }  # fmt: skip


def _flow_point(phase: str, number: int, one: Slice, origin: int) -> Event:
    return {
        "name": "request", "cat": "request", "ph": phase, "id": number,
        "ts": (one.begin - origin) / 1e3, "pid": one.pid, "tid": one.tid,
    }  # fmt: skip


def _metadata(what: str, pid: int, tid: int, **args: Any) -> Event:
    return {"name": what, "ph": "M", "ts": 0, "pid": pid, "tid": tid, "args": args}


def _json(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS)
