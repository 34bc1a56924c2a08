"""A run's time line for Perfetto (https://ui.perfetto.dev): Chrome's trace event format.

A process per engine has a thread with its steps and one with its puts. The process `requests` has a
track per request that runs at the time, with the legs of its receipt.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

import orjson

from engine.latency import StepWork
from engine.protocol import BadRequest
from engine.virtual import Row, Transfer
from router.simulation.experiment import RequestRecord
from router.simulation.fleet import VirtualFleet

__all__ = ["Timeline"]

REQUESTS = 0  # the process of the requests; engines have the following numbers
STEPS, PUTS = 0, 1  # threads of an engine
Event = dict[str, Any]


class Timeline:
    """Gathers the events of one run."""

    def __init__(self) -> None:
        self._events: list[Event] = [_name("process", REQUESTS, 0, "requests")]
        self._pids: dict[str, int] = {}  # of engines, by id

    def observe(self, fleet: VirtualFleet) -> None:
        """Note steps and puts from now on."""
        for pid, calls in enumerate(fleet.engines.values(), start=1):
            engine = calls.engine
            self._pids[engine.config.engine_id] = pid
            self._events += [
                _name("process", pid, 0, f"{engine.config.engine_id} ({engine.config.role})"),
                _name("thread", pid, STEPS, "steps"),
                _name("thread", pid, PUTS, "puts"),
            ]
            engine.steps.on_steps = partial(self._steps, pid)
        fleet.network.on_end = partial(self._put, fleet)

    def add(self, records: Sequence[RequestRecord]) -> None:
        """Add the requests of the run, which have kept their legs."""
        free: list[int] = []  # tracks
        running: list[tuple[float, int]] = []  # a heap: until when each track is in use
        tracks = 0
        for record in records:
            while running and running[0][0] <= record.at_s:
                heappush(free, heappop(running)[1])
            if free:
                track = heappop(free)
            else:
                track, tracks = tracks, tracks + 1
                self._events.append(_name("thread", REQUESTS, track, f"track {track}"))
            heappush(running, (record.at_s + record.end_s, track))
            self._request(record, track)

    def write(self, path: Path) -> None:
        """Write the file. Raises `BadRequest` if that fails."""
        try:
            path.write_bytes(orjson.dumps({"traceEvents": self._events, "displayTimeUnit": "ms"}))
        except OSError as error:
            raise BadRequest(f"--trace {path}: {error.strerror}") from None

    def _request(self, record: RequestRecord, track: int) -> None:
        about = {
            "input_tokens": record.input_tokens, "output_tokens": record.output_tokens,
            "first_token_ms": _ms(record.first_token_s), "retries": record.retries,
            "error": record.error,
        }  # fmt: skip
        name = f"request {record.number}"
        self._span(name, record.at_s, record.end_s, REQUESTS, track, about)
        for leg in record.legs:
            begin, took = record.at_s + leg.start_ms / 1e3, (leg.ms or 0.0) / 1e3
            about = {"engine": leg.engine, "begin": leg.begin, "end": leg.end, "bytes": leg.bytes}
            self._span(f"{leg.call} on {leg.engine}", begin, took, REQUESTS, track, about)

    def _steps(self, pid: int, row: Row, count: int) -> None:
        begin = row.began
        for seconds in row.durations(count):
            work = row.work
            about = {"prompt_tokens": work.prompt_tokens, "decodes": work.decodes}
            self._span(_title(work), begin, seconds, pid, STEPS, about)
            begin += seconds

    def _put(self, fleet: VirtualFleet, transfer: Transfer) -> None:
        now, pid = fleet.network.now, self._pids[transfer.source.name]
        about = {"bytes": round(transfer.size)}
        name = f"put to {transfer.target.name}"
        self._span(name, transfer.began, now - transfer.began, pid, PUTS, about)

    def _span(
        self, name: str, begin_s: float, seconds: float, pid: int, tid: int, about: Event
    ) -> None:
        event = {
            "name": name, "ph": "X", "ts": begin_s * 1e6, "dur": max(seconds, 0.0) * 1e6,
            "pid": pid, "tid": tid, "args": about,
        }  # fmt: skip
        self._events.append(event)


def _title(work: StepWork) -> str:
    if not work.decodes:
        return f"prefill {work.prompt_tokens}"
    return f"decode {work.decodes}" + (f" + {work.prompt_tokens}" if work.prompt_tokens else "")


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def _name(what: str, pid: int, tid: int, name: str) -> Event:
    return {"name": f"{what}_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
