"""What R routers cost N engines that all of them watch.

Purpose: every router polls the health and the state of every engine, follows its prefix cache over
one stream, and gets tokens over another. With R routers an engine pays R times. This bench measures
what an engine pays, at rest and under a load that does not grow with R, and what a router pays for
watching N engines.

How: N mock engines, each a process of its own, and R routers that are told of all of them. CPU
seconds are those of the processes (`/proc/PID/stat`), of all engines and of all routers, over
`SECONDS`. A figure per router is the slope from no router to R. Where the processes want more cores
than there are, routers poll more rarely: then the bytes of calls at rest grow less than R.

Bytes are those of the engines' sockets, from the kernel (`ss -ti`). A connection on which an engine
receives nothing during the interval is a stream: the feed of prefixes, or the tokens, whose request
is longer. All others carry calls: at rest, polls only. The routers serve some requests first, so
that their streams are open; they close an idle stream of tokens after a minute or two.

The load is `REQUESTS_PER_S` requests in all, whatever R is, each with a prompt of its own of
`PROMPT` tokens and `TOKENS` tokens of answer, spread evenly over the routers.

Run: `make bench-router-replicas`, or `python -m bench.router_replicas [--engines N] [--save]`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx
import uvloop

from bench.load import Answer, open_loop, post
from bench.processes import cpu_s
from bench.report import publish, table
from router.conformance.forkserver import ForkedProcess, run_engine, run_microserve

ROUTERS = (0, 1, 2, 4, 8)
ENGINES = 64
SECONDS = 30
SETTLE_S = 5.0
REQUESTS_PER_S, TOKENS, PROMPT = 32, 16, 64
CONNECTIONS = 16  # of each router's clients
STEP_MS = 10
TOGETHER = 8  # processes that start at the same time
SEEN_S = 120.0  # for a router to find all engines up
NUMBERS = itertools.count()
ID = 32  # characters of a stream's id
WARM_UP_S = 5
SOCKET = re.compile(r"bytes_(sent|received):(\d+)")


@dataclass(frozen=True, slots=True)
class Reading:
    """CPU seconds of the processes, and bytes of the engines' connections, at one time."""

    at: float
    engines_s: float
    routers_s: float
    sockets: dict[str, tuple[int, int]]  # sent and received, by the two addresses


def main() -> None:
    """Measure, print the table, publish the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=int, default=ENGINES)
    parser.add_argument("--seconds", type=int, default=SECONDS)
    parser.add_argument("--most", type=int, default=ROUTERS[-1], help="routers")
    parser.add_argument("--save", action="store_true", help="write the JSON to bench/results")
    given = parser.parse_args()
    with engines(given.engines) as watched:
        rows = [measure(watched, count, given.seconds) for count in ROUTERS if count <= given.most]
    alone = rows[0]["rest"]["engine_cpu"]
    for row in rows[1:]:
        more = row["rest"]["engine_cpu"] - alone
        row["rest"]["engine_cpu_per_router"] = round(more / row["routers"], 5)
    table(
        f"{given.engines} engines: % of a core, and bytes per second of one engine",
        ["routers", "engine at rest", "per router", "polls B/s", "prefixes B/s", "engine loaded",
         "prefixes B/s", "tokens B/s", "router at rest"],
        [
            [str(row["routers"]), *(_cell(row.get(when, {}), name) for when, name in (
                ("rest", "engine_cpu"), ("rest", "engine_cpu_per_router"), ("rest", "calls_b_s"),
                ("rest", "prefixes_b_s"), ("load", "engine_cpu"), ("load", "prefixes_b_s"),
                ("load", "tokens_b_s"), ("rest", "router_cpu")))]
            for row in rows
        ],
    )  # fmt: skip
    document = {"engines": given.engines, "seconds": given.seconds, "step_ms": STEP_MS,
                "requests_per_s": REQUESTS_PER_S, "tokens": TOKENS, "prompt": PROMPT,
                "by_routers": {str(row["routers"]): row for row in rows}}  # fmt: skip
    publish("router_replicas", document)


def _cell(part: dict[str, float], name: str) -> str:
    if name not in part:
        return ""
    return f"{part[name]:.0f}" if name.endswith("_b_s") else f"{100 * part[name]:.2f} %"


@dataclass(frozen=True, slots=True)
class Server:
    """An engine or a router."""

    url: str
    process: ForkedProcess

    def cpu_s(self) -> float:
        """Return user and system seconds so far."""
        return cpu_s(self.process.pid)


def engines(count: int) -> AbstractContextManager[list[Server]]:
    """Start mock engines, of which each is a process, and end them on exit."""
    os.environ["MICROSERVE_SECRET"] = "ab" * 32
    flags = (
        "mock", "--port", "0", "--threads", "1", "--pool-pages", "512", "--step-ms", str(STEP_MS),
        "--prefill-tokens-per-ms", "0",
    )  # fmt: skip
    return started(partial(ForkedProcess, run_engine, *flags), count)


@contextmanager
def started(start: Callable[[], ForkedProcess], count: int) -> Iterator[list[Server]]:
    """Start processes, some at a time. They are killed on exit."""
    running: list[ForkedProcess] = []

    def one(_: int) -> Server:
        process = start()
        running.append(process)
        return Server(process.line().split()[-1], process)

    try:
        with ThreadPoolExecutor(TOGETHER) as pool:
            found = list(pool.map(one, range(count)))
        yield found
    finally:
        for process in running:
            process.kill()


def measure(watched: Sequence[Server], count: int, seconds: int) -> dict[str, Any]:
    """Return the figures of `count` routers that watch these engines."""
    urls = [part for engine in watched for part in ("--engine", engine.url)]
    flags = ("router", *urls, "--port", "0", "--strategy", "cache_aware", "--parent-pid")
    start = partial(ForkedProcess, run_microserve, *flags, str(os.getpid()))
    with started(start, count) as routers:
        for router in routers:
            wait_for_engines(router.url, len(watched))
        if count:  # routers open their streams when they first need them
            _load([router.url for router in routers], WARM_UP_S)
        time.sleep(SETTLE_S)
        first = read(watched, routers)
        time.sleep(seconds)
        rest = read(watched, routers)
        row: dict[str, Any] = {"routers": count, "rest": figures(first, rest, len(watched), count)}
        if not count:
            return row
        answers: list[Answer] = []
        before = read(watched, routers)
        for found in _load([router.url for router in routers], seconds):
            answers += found
        after = read(watched, routers)
        if wrong := [one for one in answers if one.status != 200]:
            raise SystemExit(f"{len(wrong)} requests failed: {wrong[0].body[:200]!r}")
        row["load"] = figures(before, after, len(watched), count)
        row["load"]["requests"] = len(answers)
        return row


def figures(old: Reading, new: Reading, engines: int, routers: int) -> dict[str, Any]:
    """Return the cost of one engine and of one router between two readings.

    CPU in shares of a core.
    """
    seconds, quiet = new.at - old.at, streams(old, new)
    sums = {"calls": 0, "prefixes": 0, "tokens": 0}
    for name, now in new.sockets.items():
        was = old.sockets.get(name, (0, 0))
        sums[quiet.get(name, "calls")] += now[0] - was[0] + now[1] - was[1]
    cpu = {"engine_cpu": round((new.engines_s - old.engines_s) / seconds / engines, 5)}
    if routers:
        cpu["router_cpu"] = round((new.routers_s - old.routers_s) / seconds / routers, 5)
    return {
        **cpu,
        **{f"{kind}_b_s": round(total / seconds / engines, 1) for kind, total in sums.items()},
    }


def streams(old: Reading, new: Reading) -> dict[str, str]:
    """Return the kinds of the connections on which engines receive nothing.

    All that was ever received there is the request. That for tokens has an id, which that for
    prefixes lacks.
    """
    requests = {
        name: received
        for name, (_, received) in new.sockets.items()
        if name in old.sockets and received == old.sockets[name][1]
    }
    shortest = min(requests.values(), default=0)
    return {
        name: "prefixes" if size < shortest + ID / 2 else "tokens"
        for name, size in requests.items()
    }


def read(watched: Sequence[Server], routers: Sequence[Server]) -> Reading:
    """Read the CPU time of all processes and the bytes of the engines' connections."""
    ports = {engine.url.rpartition(":")[2] for engine in watched}
    command = ["ss", "-tinH", "state", "established"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    sockets: dict[str, tuple[int, int]] = {}
    name = ""
    for line in told.splitlines():
        if not line.startswith(("\t", " ")):
            own, peer = line.split()[2:4]
            name = f"{own} {peer}" if own.rpartition(":")[2] in ports else ""
        elif name:
            found = {kind: int(size) for kind, size in SOCKET.findall(line)}
            sockets[name] = (found.get("sent", 0), found.get("received", 0))
    return Reading(
        time.monotonic(),
        sum(engine.cpu_s() for engine in watched),
        sum(router.cpu_s() for router in routers),
        sockets,
    )


def _load(urls: list[str], seconds: int) -> list[list[Answer]]:
    """Put the load on all routers at once."""

    async def run() -> list[list[Answer]]:
        rate = REQUESTS_PER_S / len(urls)
        return await asyncio.gather(
            *(
                open_loop(url, requests_of(url), count=round(rate * seconds),
                          connections=CONNECTIONS, per_s=rate)
                for url in urls
            )
        )  # fmt: skip

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run())


def requests_of(url: str) -> Callable[[int], bytes]:
    def request(_: int) -> bytes:
        number = next(NUMBERS)  # so that no prompt is in any cache
        prompt = [number // 500, number % 500, *range(2, PROMPT)]
        body = {"model": "mock", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0,
                "ignore_eos": True, "stream": True}  # fmt: skip
        return post(url, "/v1/completions", json.dumps(body).encode())

    return request


def wait_for_engines(url: str, count: int) -> None:
    give_up = time.monotonic() + SEEN_S
    while httpx.get(f"{url}/health", timeout=30).json()["engines"]["up"] < count:
        if time.monotonic() > give_up:
            raise SystemExit(f"a router does not find its {count} engines")
        time.sleep(0.5)


if __name__ == "__main__":
    main()
