"""What the router pays for one who looks at its page.

Purpose: the page costs the router nothing while nobody looks, and under 2 % of a core while one
does. This bench measures it, for each view of the page.

How: N mock engines, each a process of its own, and a router in front of them. Its CPU seconds are
those of its process (`/proc/PID/stat`), over `SECONDS`, at rest and under a load. httpx plays the
page: it takes the snapshots of `/admin/live` and makes the calls of one view, with the pauses after
each answer that the page's own files state. The router keeps as many receipts as it can before the
first figure, so that lists are as long as they get.

| arm | calls |
| --- | --- |
| nobody | none |
| fleet | `/admin/live`; Latency and Playground have no other call either, once they are open |
| requests | the same, and the 100 slowest requests |
| request | the same, and the receipt of one request, as often as while it runs |
| strategies | the same, and the strategies; the audit log more rarely |

An arm's figure is its CPU time less that of `nobody` in the same round, as a share of a core. The
order of the arms is turned in every other round, and medians are of `ROUNDS` rounds. The kernel
counts CPU time in ticks of 10 ms, so one arm of `SECONDS` is exact to 0.1 % of a core; the whole
run takes 20 minutes.

The load is `REQUESTS_PER_S` requests a second, each with a prompt of its own of `PROMPT` tokens and
`TOKENS` tokens of answer.

Run: `make bench-page`, or `python -m bench.page [--engines 2 64] [--rounds N] [--save]`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import statistics
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httpx
import uvloop

from bench.load import closed_loop, open_loop
from bench.processes import cpu_s
from bench.report import publish, spread, table
from bench.router_replicas import (
    CONNECTIONS,
    PROMPT,
    REQUESTS_PER_S,
    STEP_MS,
    TOKENS,
    engines,
    requests_of,
    started,
    wait_for_engines,
)
from router.conformance.forkserver import ForkedProcess, run_microserve
from router.ui import assets

ENGINES = (2, 64)
SECONDS = 10
ROUNDS = 5
SETTLE_S = 1.0  # for connections to open and snapshots to begin
NOBODY = "nobody"
LIMIT = 0.02  # of a core
DIGITS = 5  # of shares of a core
RECEIPTS = 2048  # that the router keeps: its default


@dataclass(frozen=True, slots=True)
class Poll:
    """A call that a view repeats, with a pause of `pause_s` after each answer."""

    path: str
    pause_s: float


@dataclass(slots=True)
class Seen:
    """What the page has got, since the last `clear`."""

    snapshots: int = 0
    polls: int = 0
    size: int = 0  # bytes of bodies
    failed: list[str] = field(default_factory=list)

    def clear(self) -> None:
        self.snapshots = self.polls = self.size = 0


def main() -> None:
    """Measure, print the table, publish the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--engines", type=int, nargs="+", default=ENGINES)
    parser.add_argument("--seconds", type=int, default=SECONDS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--save", action="store_true", help="write the JSON to bench/results")
    given = parser.parse_args()
    by_engines = {count: measure(count, given.seconds, given.rounds) for count in given.engines}
    looking = {
        f"{count} engines, {load}, {name}": arm
        for count, told in by_engines.items()
        for load, arms in told.items()
        for name, arm in arms.items()
    }
    parts = ("snapshots_per_s", "polls_per_s", "kb_per_s")
    table(
        "% of a core, median (least to most); what the page got per second",
        ["arm", "router", "more than nobody", "snapshots", "polls", "KB"],
        [
            [name, *(_percent(arm[part]) if part in arm else "" for part in ("cpu", "more_cpu")),
             *(f"{arm[part]:.1f}" if part in arm else "" for part in parts)]
            for name, arm in looking.items()
        ],
    )  # fmt: skip
    most = max(arm["more_cpu"]["median"] for arm in looking.values() if "more_cpu" in arm)
    document = {
        "seconds": given.seconds, "rounds": given.rounds, "step_ms": STEP_MS,
        "requests_per_s": REQUESTS_PER_S, "tokens": TOKENS, "prompt": PROMPT,
        "limit_cpu": LIMIT, "most_more_cpu": most,
        "by_engines": {str(count): told for count, told in by_engines.items()},
    }  # fmt: skip
    publish("page", document)


def _percent(share: dict[str, float]) -> str:
    low, middle, high = (100 * share[name] for name in ("min", "median", "max"))
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def measure(count: int, seconds: int, rounds: int) -> dict[str, dict[str, Any]]:
    """Return the figures of the arms in front of `count` engines, at rest and under load."""
    with engines(count) as watched:
        urls = [part for engine in watched for part in ("--engine", engine.url)]
        flags = (
            "router", *urls, "--port", "0", "--strategy", "cache_aware",
            "--max-receipts", str(RECEIPTS), "--parent-pid",
        )  # fmt: skip
        start = partial(ForkedProcess, run_microserve, *flags, str(os.getpid()))
        with started(start, 1) as (router,), asyncio.Runner(
            loop_factory=uvloop.new_event_loop
        ) as runner:  # fmt: skip
            wait_for_engines(router.url, count)
            return runner.run(_measure(router.url, router.process.pid, seconds, rounds))


async def _measure(url: str, pid: int, seconds: int, rounds: int) -> dict[str, dict[str, Any]]:
    await closed_loop(url, requests_of(url), count=RECEIPTS, connections=CONNECTIONS)
    views = await _views(url)
    found: dict[str, dict[str, list[dict[str, float]]]] = {
        load: {name: [] for name in (NOBODY, *views)} for load in ("at rest", "under load")
    }
    for number in range(rounds):
        for load, arms in found.items():
            for name in reversed([*arms]) if number % 2 else arms:
                # Anew for each arm: the receipt that one looks at does not last under load.
                polls = (await _views(url)).get(name)
                arms[name].append(await _arm(url, pid, seconds, polls, load == "under load"))
    return {load: _summary(arms) for load, arms in found.items()}


def _summary(arms: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    alone = [one["cpu"] for one in arms[NOBODY]]
    told: dict[str, Any] = {NOBODY: {"cpu": spread(alone, DIGITS)}}
    for name, each in arms.items():
        if name != NOBODY:
            more = [one["cpu"] - base for one, base in zip(each, alone, strict=True)]
            told[name] = {
                "cpu": spread([one["cpu"] for one in each], DIGITS),
                "more_cpu": spread(more, DIGITS),
            }
            for part in ("snapshots_per_s", "polls_per_s", "kb_per_s"):
                told[name][part] = round(statistics.median(one[part] for one in each), 2)
    return told


async def _views(url: str) -> dict[str, list[Poll]]:
    """Return the calls that each view repeats, besides `/admin/live`."""
    async with httpx.AsyncClient(base_url=url, timeout=30) as http:
        slowest = "/admin/requests?limit=100&order=slowest&state=ended&seconds=300"
        newest = (await http.get("/admin/requests?limit=1&state=ended")).json()["requests"]
    one = f"/admin/requests/{newest[0]['id']}"
    return {
        "fleet": [],
        "requests": [Poll(slowest, _pause("views/requests.js", r"EVERY_MS = (\d+)"))],
        "request": [Poll(one, _pause("views/waterfall.js", r"RUNNING_MS = (\d+)"))],
        "strategies": [
            Poll("/admin/strategies", _pause("views/strategies.js", r"LOOK_MS = (\d+)")),
            Poll("/admin/audit", _pause("strategies/audit.js", r"\[turn\], ([\d_]+)\)")),
        ],
    }


def _pause(file: str, pattern: str) -> float:
    """Return the seconds that a file of the page has as its pause."""
    found = re.search(pattern, assets()[file].body.decode())
    if found is None:
        raise SystemExit(f"{file} has no pause of the form {pattern}")
    return int(found[1]) / 1e3


async def _arm(
    url: str, pid: int, seconds: int, polls: Sequence[Poll] | None, loaded: bool
) -> dict[str, float]:
    """Return what the router used while one looks, or nobody if `polls` is `None`."""
    seen = Seen()
    async with AsyncExitStack() as stack:
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        looking: list[asyncio.Task[None]] = []
        if polls is not None:
            http = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=30))
            looking = [tasks.create_task(_listen(http, seen))]
            looking += [tasks.create_task(_poll(http, poll, seen)) for poll in polls]
        load = tasks.create_task(_load(url, seconds + 2 * SETTLE_S)) if loaded else None
        await asyncio.sleep(SETTLE_S)
        seen.clear()
        began, before = time.monotonic(), cpu_s(pid)
        await asyncio.sleep(seconds)
        used, took = cpu_s(pid) - before, time.monotonic() - began
        got = {
            "cpu": used / took,
            "snapshots_per_s": seen.snapshots / took,
            "polls_per_s": seen.polls / took,
            "kb_per_s": seen.size / 1e3 / took,
        }
        if load is not None:
            await load
        for task in looking:
            task.cancel()
    if seen.failed:
        raise SystemExit(f"{len(seen.failed)} calls of the page failed: {seen.failed[0]}")
    if polls is not None and not seen.snapshots:
        raise SystemExit("the page got no snapshot")
    return got


async def _listen(http: httpx.AsyncClient, seen: Seen) -> None:
    with suppress(asyncio.CancelledError):
        async with http.stream("GET", "/admin/live", timeout=None) as reply:
            async for line in reply.aiter_lines():
                seen.snapshots += line.startswith("data: ")
                seen.size += len(line) + 1


async def _poll(http: httpx.AsyncClient, poll: Poll, seen: Seen) -> None:
    with suppress(asyncio.CancelledError):
        while True:
            reply = await http.get(poll.path)
            if reply.status_code != 200:
                seen.failed.append(f"{poll.path}: {reply.text[:200]}")
            seen.polls += 1
            seen.size += len(reply.content)
            await asyncio.sleep(poll.pause_s)


async def _load(url: str, seconds: float) -> None:
    """Put the load on the router. Raises `SystemExit` if a request fails."""
    answers = await open_loop(
        url, requests_of(url), count=round(REQUESTS_PER_S * seconds), connections=CONNECTIONS,
        per_s=REQUESTS_PER_S,
    )  # fmt: skip
    if wrong := [one for one in answers if one.status != 200]:
        raise SystemExit(f"{len(wrong)} requests failed: {wrong[0].body[:200]!r}")


if __name__ == "__main__":
    main()
