"""What R routers cost N engines that all of them watch, and what their separate views cost.

Purpose: `bench.router_replicas` measures processes, of which one machine has room for 8 routers and
64 engines. This bench goes beyond that in virtual time. It counts calls, not their CPU time.

How: R routers with `cache_aware` in front of N virtual engines, which are one fleet. Each router
has its own registry: it polls every engine and follows every engine's feed of cached prefixes. The
load by which `cache_aware` chooses is that of the router's own requests, and that of others as of
the last poll. All routers get the same
catalogue of conversations, whose requests are dealt to them in turn, so that the turns of a
conversation reach different routers. The rate per engine is the same for every R and N.

Polls, changes of the feed and generations are counted where the routers' calls reach an engine,
and divided by the engines and by the seconds of the run. `hit_rate` is the share of the prompts'
tokens that were cached. Requests that arrive in the first `WARM_UP_S` seconds, when caches are
empty, count in neither the hit rate nor the times to the first token.

Run: `make bench-simulated-routers`, or `python -m bench.simulated_routers [--save]`. Nothing
depends on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import statistics
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AsyncExitStack
from typing import Any, NamedTuple

from bench.report import publish, table
from engine.protocol import EngineState, PrefixChange
from engine.virtual import VirtualLoop
from router.base import Chunk, Request, RouterConfig
from router.engines import Headers
from router.execution import ChoiceWriter
from router.simulation import (
    SimulatedRouter,
    VirtualCalls,
    VirtualFleet,
    read_fleet,
    simulated_router,
)
from router.simulation.fleet import VirtualChunks
from router.simulation.requests import prompt_of, sampling_of
from router.supervision import adopting
from router.workload import LoadRequest, WorkloadConfig, open_workload
from strategies.cache_aware import cache_aware

ROUTERS = (1, 8, 16, 32)
ENGINES = (64, 256)
PROFILE = "llama-3.1-8b@a100"
RATE = 2.0  # requests per second and engine, once conversations have begun to end
SECONDS, WARM_UP_S = 15.0, 5.0  # in which requests arrive, and the first of these
CALL_S = 1e-3
CHUNK_TOKENS = 16  # that engines gather: the times of first tokens are the same
SEED = 1


class Ended(NamedTuple):
    """A request that has ended."""

    at_s: float
    prompt_tokens: int
    cached_tokens: int
    first_token_ms: float


class CountedCalls(VirtualCalls):
    """One router's calls to an engine, which count."""

    def __init__(self, calls: VirtualCalls, counts: Counter[str]) -> None:
        super().__init__(calls.engine, calls.fleet)
        self._counts = counts

    async def state(self) -> EngineState:
        self._counts["polls"] += 1
        return await super().state()

    async def prefixes(self) -> AsyncGenerator[PrefixChange, None]:
        async for change in super().prefixes():
            self._counts["changes"] += 1
            yield change

    async def start_generate(self, body: dict[str, Any], headers: Headers) -> VirtualChunks:
        self._counts["requests"] += 1
        return await super().start_generate(body, headers)


class CountedFleet(VirtualFleet):
    """A fleet that counts the calls of all its routers."""

    def __init__(self) -> None:
        super().__init__(call_s=CALL_S)
        self.counts: Counter[str] = Counter()

    def connect(self, url: str) -> CountedCalls:
        return CountedCalls(super().connect(url), self.counts)


class Nothing(ChoiceWriter):
    """Keeps only the tokens."""

    def send(self, chunk: Chunk) -> None:
        pass


def main() -> None:
    """Measure, print the table, publish the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--save", action="store_true", help="write the JSON to bench/results")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="in which requests arrive")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    given = parser.parse_args()
    # The long ones begin first.
    settings = [(routers, engines) for engines in ENGINES[::-1] for routers in ROUTERS[::-1]]
    with ProcessPoolExecutor(given.jobs) as pool:
        found = pool.map(measure, *zip(*settings, strict=True), itertools.repeat(given.seconds))
        rows = list(found)[::-1]
    table(
        "per engine and second; hit rate; times to first token",
        ["engines, routers", "polls", "changes", "requests", "hit rate", "p50 ms", "p99 ms"],
        [
            [f"{row['engines']}, {row['routers']}", *(str(row[name]) for name in (
                "polls", "changes", "requests", "hit_rate", "ttft_p50_ms", "ttft_p99_ms"))]
            for row in rows
        ],
    )  # fmt: skip
    by = {
        str(engines): {str(row["routers"]): row for row in rows if row["engines"] == engines}
        for engines in ENGINES
    }
    document = {"profile": PROFILE, "rate": RATE, "seconds": given.seconds, "seed": SEED,
                "warm_up_s": WARM_UP_S, "health_interval_s": RouterConfig().health_interval_s,
                "by_engines": by}  # fmt: skip
    publish("simulated_routers", document)


def measure(routers: int, engines: int, seconds: float) -> dict[str, Any]:
    """Return the figures of so many routers in front of so many engines."""
    random.seed(f"{SEED} {routers} {engines}")  # of pauses; the workload has its own
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(_measure(routers, engines, seconds))


async def _measure(count: int, engines: int, seconds: float) -> dict[str, Any]:
    loop, fleet = asyncio.get_running_loop(), CountedFleet()
    for one in read_fleet(f"{engines}x{PROFILE}"):
        fleet.add(one.config, one.profile, one.kind)
    workload = open_workload(
        WorkloadConfig("prefix-sharing", seed=SEED, rate=RATE * engines)
    ).requests
    requests = list(itertools.takewhile(lambda one: (one.at_s or 0.0) < seconds, workload))
    ended: list[Ended] = []
    with adopting(loop):
        async with AsyncExitStack() as stack:
            routers = [
                await stack.enter_async_context(
                    simulated_router(cache_aware.bind({}), fleet, RouterConfig(), name=f"r{number}")
                )
                for number in range(count)
            ]
            await _drive(routers, requests, ended)
            took = loop.time()
            counts = dict(fleet.counts)
            await asyncio.sleep(1.0)  # for releases
            for router in routers:
                if router.left or router.violations:
                    raise SystemExit(f"left: {router.left}; violations: {router.violations[:1]}")
        fleet.check_integrity()
    counted = [one for one in ended if one.at_s >= WARM_UP_S]
    cuts = statistics.quantiles((one.first_token_ms for one in counted), n=100)
    prompts = sum(one.prompt_tokens for one in counted)
    return {
        "routers": count,
        "engines": engines,
        "sent": len(requests),
        "counted": len(counted),
        "virtual_s": round(took, 3),
        **{name: round(number / engines / took, 2) for name, number in sorted(counts.items())},
        "hit_rate": round(sum(one.cached_tokens for one in counted) / prompts, 4),
        "ttft_p50_ms": round(cuts[49], 1),
        "ttft_p99_ms": round(cuts[98], 1),
    }


async def _drive(
    routers: Sequence[SimulatedRouter], requests: Sequence[LoadRequest], ended: list[Ended]
) -> None:
    """Send each request at its time, to the routers in turn, and wait until all have ended."""
    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as tasks:
        for number, request in enumerate(requests):
            at = request.at_s or 0.0
            if (wait := at - loop.time()) > 0:
                await asyncio.sleep(wait)
            router = routers[number % len(routers)]
            tasks.create_task(_send(router, number, request, at, ended))


async def _send(
    router: SimulatedRouter, number: int, load: LoadRequest, at: float, ended: list[Ended]
) -> None:
    prompt = prompt_of(load, number)
    request = Request(
        str(number), prompt, sampling_of(load, number), session=load.session,
        chunk_tokens=CHUNK_TOKENS,
    )  # fmt: skip
    receipt = router.receipt(request, at)
    await router.run(request, Nothing(receipt), receipt)
    first = receipt.first_token_ms
    if first is None:
        raise SystemExit(f"request {number} has no token")
    cached = sum(leg.cached_tokens for leg in receipt.legs if leg.call == "start_generate")
    ended.append(Ended(at, len(prompt), cached, first))


if __name__ == "__main__":
    main()
