"""Time from a client's disconnect until both engines of its request hold nothing of it.

Purpose: users of disaggregation see aborted requests hold KV for minutes on the engine that does
not learn of the abort. Here the router cancels both legs at once, and engines act between steps.

Theory: the router notices a closed socket at once and aborts each leg by closing its connection to
the engine. An engine frees pages between two steps, so the bound is a step and two round trips.

How: `microserve up MODEL` with two engines and `prefill_decode`. A client sends a prompt of
`--prompt` random tokens and closes its socket at a chosen moment; then both engines are polled
(`GET /microserving/state`, about a millisecond each) until they hold nothing of it. `--trials` per
moment, which are:

- `streaming`: after the third chunk. `steps`: steps that the engines began after the socket closed;
- `waiting_for_kv`: the decode engine has leased pages, and the prefill engine computes;
- `in_mid_put`: the prefill engine has a put in flight;
- `among_streams`: after the third chunk, while `--streams` others run. Their number must be as
  before, and the pages of the prompt must be free.

Figures are in milliseconds: the median, the 99th percentile and the maximum. `step_ms` is the
engines' mean step meanwhile.

A line per moment on standard error tells the progress. Of a real model the prompts are shorter, the
trials and the other streams fewer (`SIZES`): two cores prefill some 1000 tokens per second.

Run: `make bench-disconnect`, or `python -m bench.disconnect [--save] [--model smollm2]`.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any
from urllib.parse import urlsplit

import orjson

from bench.deployment import Deployment, deployed
from bench.report import publish, table
from router.engines.http_client import HttpClient

LONG = 4000  # tokens of a stream: more than it gets before its client leaves
POOL_PAGES = 60_000  # per engine of `tiny`; of another model, the engine's choice
BOUND_S = 60.0
PAGE = 16
State = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Size:
    """How much a measurement does."""

    prompt: int  # tokens
    trials: int  # per moment
    streams: int  # beside the measured one in `among_streams`


SIZES = {"tiny": Size(prompt=1500, trials=100, streams=200)}
REAL = Size(prompt=600, trials=20, streams=32)


class Engines:
    """The two engines, by their state and their metrics."""

    def __init__(self, urls: list[str], key: str) -> None:
        self._clients = [HttpClient(url, api_key=key) for url in urls]

    async def states(self) -> list[State]:
        return [await self._state(client) for client in self._clients]

    async def _state(self, client: HttpClient) -> State:
        state: State = orjson.loads((await client.call("GET", "/microserving/state")).body)
        return state

    async def steps(self) -> tuple[float, float]:
        """Return the number of steps so far, and their seconds, of both engines."""
        count = seconds = 0.0
        for client in self._clients:
            text = (await client.call("GET", "/metrics")).body.decode()
            for line in text.splitlines():
                if line.startswith("microserve:steps_total"):
                    count += float(line.split()[-1])
                elif line.startswith("microserve:step_seconds_total"):
                    seconds += float(line.split()[-1])
        return count, seconds

    async def until(self, holds: Callable[[list[State]], bool]) -> float:
        """Poll until `holds`; return when it did (perf_counter).

        Raises `TimeoutError` after a minute.
        """
        async with asyncio.timeout(BOUND_S):
            while True:
                states = await self.states()
                if holds(states):
                    return time.perf_counter()


def used(states: list[State]) -> int:
    """Return the pages that are neither free nor cached."""
    pages = [state["pages"] for state in states]
    return sum(page["total"] - page["free"] - page["cached"] for page in pages)


def busy(states: list[State]) -> int:
    """Return the number of generations, leases and puts."""
    return sum(
        state["running"] + state["waiting"] + len(state["leases"]) + state["puts_in_flight"]
        for state in states
    )


class Client:
    """A streamed completion over a socket of its own."""

    def __init__(self, url: str, model: str, tokens: int) -> None:
        parts = urlsplit(url)
        self._address = parts.hostname, parts.port
        self._host = parts.netloc
        prompt = [random.randrange(10, 290) for _ in range(tokens)]
        self._body = orjson.dumps(
            {"model": model, "prompt": prompt, "max_tokens": LONG, "ignore_eos": True,
             "stream": True}
        )  # fmt: skip

    async def begin(self) -> None:
        self._reader, self._writer = await asyncio.open_connection(*self._address)
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {self._host}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(self._body)}\r\n\r\n"
        )
        self._writer.write(head.encode() + self._body)

    async def chunks(self, count: int) -> None:
        """Return after `count` chunks. Raises `RuntimeError` if the router refuses."""
        head = await self._reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in head.split(b"\r\n", 1)[0]:
            raise RuntimeError((head + await self._reader.read(500)).decode())
        for _ in range(count):
            await self._reader.readuntil(b"data: {")

    def leave(self) -> float:
        """Close the socket; return when (perf_counter)."""
        self._writer.transport.abort()
        return time.perf_counter()


async def streaming(client: Client, engines: Engines) -> None:
    """Return once tokens flow."""
    await client.chunks(3)


async def waiting_for_kv(client: Client, engines: Engines) -> None:
    """Return once the decode engine waits for KV that the prefill engine computes."""
    await engines.until(
        lambda states: (
            any(state["leases"] for state in states)
            and any(state["running"] or state["puts_in_flight"] for state in states)
        )
    )


async def in_mid_put(client: Client, engines: Engines) -> None:
    """Return once KV is on its way."""
    await engines.until(lambda states: any(state["puts_in_flight"] for state in states))


Moment = Callable[[Client, Engines], Awaitable[None]]
MOMENTS: dict[str, Moment] = {
    "streaming": streaming,
    "waiting_for_kv": waiting_for_kv,
    "in_mid_put": in_mid_put,
}


async def measure(deployment: Deployment, model: str, size: Size) -> dict[str, Any]:
    """Measure all moments."""
    trials = Trials(deployment.url, model, Engines(deployment.engines, deployment.engine_key), size)
    figures: dict[str, Any] = {}
    for name, moment in MOMENTS.items():
        figures[name] = await trials.run(name, moment)
    async with trials.crowd():
        figures["among_streams"] = await trials.run("among_streams", streaming)
    await trials.engines.until(lambda states: not used(states) and not busy(states))
    return figures


@dataclass(frozen=True, slots=True)
class Trials:
    """Requests whose clients leave."""

    url: str
    model: str
    engines: Engines
    size: Size

    async def run(self, name: str, moment: Moment) -> dict[str, float]:
        """Have a client leave at `moment`, again and again."""
        engines, size, since = self.engines, self.size, time.perf_counter()
        took, steps = [], []
        first, first_s = await engines.steps()
        for _ in range(size.trials):
            before = busy(await engines.states())
            client = Client(self.url, self.model, size.prompt)
            await client.begin()
            await moment(client, engines)
            held = used(await engines.states())
            began, _ = await engines.steps()
            left = client.leave()
            at = await engines.until(_released(held, before, size.prompt // PAGE))
            took.append(1000 * (at - left))
            steps.append((await engines.steps())[0] - began)
        last, last_s = await engines.steps()
        print(
            f"{name}: {size.trials} trials in {time.perf_counter() - since:.0f} s", file=sys.stderr
        )
        return {
            "median_ms": round(statistics.median(took), 2),
            "p99_ms": round(statistics.quantiles(took, n=100, method="inclusive")[98], 2),
            "max_ms": round(max(took), 2),
            "step_ms": round(1000 * (last_s - first_s) / (last - first), 2),
            "steps_median": statistics.median(steps),
            "steps_max": max(steps),
            "trials": size.trials,
        }

    @asynccontextmanager
    async def crowd(self) -> AsyncIterator[None]:
        """Run `streams` streams beside the body."""
        clients = [Client(self.url, self.model, PAGE) for _ in range(self.size.streams)]

        async def read(client: Client) -> None:
            await client.begin()
            await client.chunks(LONG)

        async with asyncio.TaskGroup() as tasks:
            readers = [tasks.create_task(read(client)) for client in clients]
            await self.engines.until(
                lambda states: (
                    sum(state["running"] for state in states) == len(clients)
                    and not any(state["leases"] or state["puts_in_flight"] for state in states)
                )
            )
            yield
            for reader in readers:
                reader.cancel()
            for client in clients:
                client.leave()


def _released(held: int, others: int, pages: int) -> Callable[[list[State]], bool]:
    """Return a condition: the `pages` of one prompt are free, and `others` is all that is busy.

    Beside other streams, whose pages grow in number, a prompt's pages show as a sudden drop.
    """
    last, dropped = held, False

    def holds(states: list[State]) -> bool:
        nonlocal last, dropped
        now = used(states)
        dropped = dropped or (last - now >= pages // 2 if others else not now)
        last = now
        return dropped and busy(states) <= others

    return holds


def main() -> None:
    """Measure, print the table, publish the JSON."""
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--save", action="store_true", help="keep the figures in bench/results")
    options.add_argument("--model", default="tiny", help="tiny or smollm2")
    options.add_argument("--prompt", type=int, help="tokens of the measured request")
    options.add_argument("--trials", type=int, help="per moment")
    options.add_argument("--streams", type=int, help="other streams, of `among_streams`")
    given = options.parse_args()
    size = SIZES.get(given.model, REAL)
    changed = {name: value for name in asdict(size) if (value := getattr(given, name)) is not None}
    size = replace(size, **changed)
    flags = ["--engines", "2", "--strategy", "prefill_decode"]
    if given.model == "tiny":
        flags += ["--pool-pages", str(POOL_PAGES), "--threads", "1"]
    with deployed(given.model, *flags) as deployment:
        figures = asyncio.run(measure(deployment, given.model, size))
    columns = ["", "median ms", "p99 ms", "max ms", "step ms", "steps, median", "steps, max"]
    table(
        f"{given.model}: from a disconnect until both engines hold nothing of the request",
        columns,
        [
            [name, *(f"{value:g}" for value in list(row.values())[:6])]
            for name, row in figures.items()
        ],
    )
    kind = ["--model", given.model] if given.model != "tiny" else []
    publish("disconnect", {**figures, "size": asdict(size)}, *kind)


if __name__ == "__main__":
    main()
