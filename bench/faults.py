"""Engines that die and hang under load, unnoticed by their clients.

Purpose: `replicate` promises that a request survives its engine. This breaks engines for minutes,
one after the other, under streams of all kinds, and compares every answer with that of an
undisturbed engine.

How: three engines of the model `tiny` behind a router with `replicate`, `--streams` clients, each
with one request after the other: prompts of 5 to 600 tokens, 60 to 300 new ones, greedy, seeded,
with penalties, with stop strings. Every few seconds an engine is killed (SIGKILL) and started again
on its port, or stopped (SIGSTOP) and later continued, or killed while it is stopped. The next fault
waits until the router uses the engine again. The receipts tell how each request went.

Theory: a replica gets `k` tokens at a time, and one write is under way at a time. So it lags by 2 k
at most where a write takes less than k steps, and with the token that each resumption has to
compute anyway, `recomputed_tokens_max` is at most 2 k + 1. A request that was not mirrored yet
when its engine died (it had just begun, or its replica's engine died before) is computed again
completely: `recomputed_full` counts these. A lost connection reveals a killed engine at once; a
stopped one is detected by its silence after `health_timeout_s` and one interval between health
checks, 2.5 s in all.
`detect` is from the signal until the request's leg has ended, `resume` until its next token.

With `--engine-flags`, such as `--pp 2`, engines have workers. Half of their faults then hit one of
the workers: it is killed or stopped, and the engine has to replace it; `worker_faults` counts them.
Answers are compared with those of an engine of one process, or with `--oracle-flags`: sums of
`--tp 2` are rounded otherwise.

With `--borrow`, engines have pools of 2048 tokens and borrow from each other. A part of the prompts
has up to 3000 tokens, so engines that die or hang are creditors and debtors. The strategy is
`data_parallel`, since a context beyond a pool has no replica: a request whose own engine dies is
computed again (`recomputed_full`), up to 20 times; one whose creditor dies computes again the
blocks that were there. `moved_blocks`, `lost_blocks`, `recomputed_tokens` and `recovered_steps` are
sums over all engines, up to the death of those that were killed.

Run: `make bench-faults`, or `python -m bench.faults [--minutes 5] [--streams 16] [--save]
[--borrow] [--engine-flags "--pp 2" --engine-flags "--pp 2 --device-pages 600"]`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import secrets
import shlex
import signal
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx

from bench.faults_fleet import (
    UP_S,
    Engine,
    Fleet,
    blocks_of,
    borrowing,
    deployed,
    leaked_pages,
    oracle,
    replicating,
    until_up,
)
from bench.faults_requests import LONG, SHORT, Case, ask, case_of, events, undisturbed
from bench.report import p99, publish, table

EVERY = 16
CASES = 48
PAUSE_S = (1.0, 3.0)  # between faults, after the engine is back


@dataclass
class Fault:
    kind: str  # kill or stop
    engine: str
    at: float  # wall clock: receipts have that too
    over: float = float("inf")


@dataclass
class Tally:
    faults: list[Fault] = field(default_factory=list)
    worker_faults: Counter[str] = field(default_factory=Counter)
    requests: int = 0
    failed: list[str] = field(default_factory=list)
    differing: int = 0
    recomputed: list[int] = field(default_factory=list)
    recomputed_full: int = 0
    detect: dict[str, list[float]] = field(default_factory=lambda: {"kill": [], "stop": []})
    resume: dict[str, list[float]] = field(default_factory=lambda: {"kill": [], "stop": []})
    false_alarms: list[str] = field(default_factory=list)
    blocks: Counter[str] = field(default_factory=Counter)  # of engines that borrow

    def read(self, receipt: dict[str, Any]) -> None:
        """Record recomputed tokens and the times to detect and resume from a request's receipt."""
        legs = [leg for leg in receipt["legs"] if leg["call"] == "start_generate"]
        for lost, after in itertools.pairwise(legs):
            ended = receipt["created"] + (lost["start_ms"] + (lost["ms"] or 0.0)) / 1e3
            faults = [f for f in self.faults if f.engine == lost["engine"] and f.at <= ended]
            if lost["tokens"] or lost["landed"]:
                complete = (lost["landed"] or 0) >= receipt["prompt_tokens"]
                if complete and after["engine"] == lost["replica"]:
                    self.recomputed.append(after["recomputed_tokens"] or 0)
                else:
                    self.recomputed_full += 1
            began = receipt["created"] + lost["start_ms"] / 1e3
            if not faults or faults[-1].at < began:
                continue  # the leg began after its engine was lost, or was refused
            fault = faults[-1]
            self.detect[fault.kind].append((ended - fault.at) * 1e3)
            if after["first_token_ms"] is not None:
                resumed = receipt["created"] + (after["start_ms"] + after["first_token_ms"]) / 1e3
                self.resume[fault.kind].append((resumed - fault.at) * 1e3)


def main() -> None:
    """Break engines, print the table, publish the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--engine-flags", action="append", default=[], type=shlex.split)
    parser.add_argument("--oracle-flags", default=[], type=shlex.split)
    parser.add_argument("--borrow", action="store_true", help="contexts beyond one pool")
    parser.add_argument("--save", action="store_true")
    flags = parser.parse_args()
    engines = [tuple(each) for each in flags.engine_flags]
    fleet = borrowing() if flags.borrow else replicating(EVERY, engines)
    figures = asyncio.run(run(flags.minutes, flags.streams, fleet, tuple(flags.oracle_flags)))
    rows = [[name, str(value)] for name, value in figures.items()]
    table("engines that die and hang under load", ["what", "value"], rows)
    publish("faults_borrow" if flags.borrow else "faults_split" if engines else "faults", figures)


async def run(
    minutes: float, streams: int, fleet: Fleet, oracle_flags: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Break the engines of a fleet for some minutes; return the figures."""
    async with deployed(fleet) as (engines, router, http):
        cases = [case_of(number, LONG if fleet.borrows else SHORT) for number in range(CASES)]
        async with oracle(oracle_flags) as alone:
            for case in cases:
                case.tokens, case.text = await undisturbed(http, alone, case)
        tally = Tally()
        over = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            listener = tasks.create_task(_listen(http, router, tally))
            clients = [
                tasks.create_task(_client(http, router, cases, tally, over, number))
                for number in range(streams)
            ]
            await _break(http, router, engines, fleet, tally, 60 * minutes)
            over.set()
            await asyncio.wait(clients)
            listener.cancel()
        leaked = sum([await leaked_pages(http, one) for one in engines])
        for one in engines:
            tally.blocks += await blocks_of(http, one)
    kills = sum(fault.kind == "kill" for fault in tally.faults)
    for message in (*tally.failed, *tally.false_alarms):
        print(message)
    return {
        "minutes": minutes,
        "streams": streams,
        "every": EVERY,
        "killed": kills,
        "stopped": len(tally.faults) - kills,
        "worker_faults": dict(tally.worker_faults),
        "engine_flags": [" ".join(own) for own in fleet.flags],
        "requests": tally.requests,
        "failed": len(tally.failed),
        "differing": tally.differing,
        "leaked_pages": leaked,
        "resumed": len(tally.recomputed),
        "recomputed_tokens_max": max(tally.recomputed, default=0),
        "recomputed_tokens_mean": _mean(tally.recomputed),
        "recomputed_full": tally.recomputed_full,
        "false_alarms": len(tally.false_alarms),
        "detect_ms_p99": _p99([*tally.detect["kill"], *tally.detect["stop"]]),
        **{f"detect_{kind}_ms_p99": _p99(times) for kind, times in tally.detect.items()},
        **{f"resume_{kind}_ms_p99": _p99(times) for kind, times in tally.resume.items()},
        **dict(tally.blocks),
    }


async def _client(
    http: httpx.AsyncClient,
    router: str,
    cases: list[Case],
    tally: Tally,
    over: asyncio.Event,
    number: int,
) -> None:
    source = random.Random(number)
    while not over.is_set():
        case = source.choice(cases)
        request_id = secrets.token_hex(8)
        tally.requests += 1
        try:
            tokens, text = await ask(http, router, case, request_id)
        except (httpx.HTTPError, OSError, RuntimeError) as error:
            tally.failed.append(f"{type(error).__name__}: {error}")
            continue
        if (tokens, text) != (case.tokens, case.text):
            tally.differing += 1
        tally.read((await http.get(f"{router}/admin/requests/{request_id}")).json())


async def _break(
    http: httpx.AsyncClient,
    router: str,
    engines: list[Engine],
    fleet: Fleet,
    tally: Tally,
    for_s: float,
) -> None:
    """Inject one fault at a time, each after the previous one is over."""
    source = random.Random(0)
    give_up = time.monotonic() + for_s
    await asyncio.sleep(PAUSE_S[1])
    while time.monotonic() < give_up:
        victim = source.choice(engines)
        if victim.flags and not fleet.borrows and source.random() < 0.5:
            await _break_worker(http, victim, tally, source)
            await asyncio.sleep(source.uniform(*PAUSE_S))
            continue
        kind = source.choice(("kill", "kill", "stop", "stop and kill"))
        number = signal.SIGKILL if kind == "kill" else signal.SIGSTOP
        if kind != "stop":
            tally.blocks += await blocks_of(http, victim)
        tally.faults.append(Fault(kind.split()[0], victim.name, time.time()))
        victim.signal(number)
        if kind != "kill":
            await asyncio.sleep(source.uniform(3.5, 6.0))
        if kind == "stop":
            victim.signal(signal.SIGCONT)
        else:
            victim.end()
            await asyncio.sleep(source.uniform(0.2, 2.0))
            await asyncio.to_thread(victim.start)
        await until_up(http, router)
        tally.faults[-1].over = time.time()
        await asyncio.sleep(source.uniform(*PAUSE_S))


async def _break_worker(
    http: httpx.AsyncClient, victim: Engine, tally: Tally, source: random.Random
) -> None:
    """Kill or stop a worker, and wait until the engine has replaced it."""

    async def workers() -> list[dict[str, Any]]:
        state = (await http.get(f"{victim.url}/microserving/state")).json()
        found: list[dict[str, Any]] = state["workers"]
        return found

    before = await workers()
    kind, rank = source.choice(("kill", "stop")), source.randrange(len(before))
    number = signal.SIGKILL if kind == "kill" else signal.SIGSTOP
    os.kill(before[rank]["pid"], number)
    tally.worker_faults[kind] += 1
    async with asyncio.timeout(UP_S):
        while (await workers())[rank]["restarts"] == before[rank]["restarts"]:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def _listen(http: httpx.AsyncClient, router: str, tally: Tally) -> None:
    """Record engines that the router considers lost although they are not broken."""
    async with http.stream("GET", f"{router}/admin/events", timeout=None) as reply:
        async for data in events(reply):
            event = json.loads(data)
            broken = [f for f in tally.faults if f.engine == event.get("id")]
            if event.get("status") == "down" and not any(f.over > time.time() for f in broken):
                last = [f"{f.kind} over for {time.time() - f.over:.1f} s" for f in broken[-1:]]
                tally.false_alarms.append(f"{event['id']}: {event['reason']} {last}")


def _p99(times: list[float]) -> float | None:
    return round(p99(times), 1) if times else None


def _mean(counts: list[int]) -> float | None:
    return round(statistics.mean(counts), 1) if counts else None


if __name__ == "__main__":
    main()
