"""CPU and latency of a request in the router, compared with vllm-router, which is written in Rust.

Purpose: our router runs a Python program for each request, tokenizes, keeps leases and receipts,
and continues elsewhere when an engine dies; vllm-router forwards bytes. Ours should cost no more.

Theory: a forwarder reads every token of every request from an engine. Our engines send one frame
per step on one connection, with the tokens of all requests of a router. Per token, both routers
write once to the client's socket; only the forwarder also reads.

How: the same load generator (`bench/load.py`) sends the same requests to both routers in turn,
`REPEATS` times. Both use the same two mock engine processes: vllm-router calls their
`/v1/completions`, ours their microserving API. Requests have 32 tokens, prompts 64.

- `cpu_*`: CPU seconds (user and system, `/proc/PID/stat`) of the router's process per request, ours
  over theirs, medians. `plain`: one JSON answer; `stream_burst`: streamed, steps that take no time;
  `stream_paced`: streamed, a step every 5 ms, 32 streams at any time. By default
  (`--stream-interval-ms 20`) ours joins tokens that come within 20 ms, except the first and the
  last: about nine chunks, where vllm-router forwards the engines' 32. `stream_paced_each` is the
  same with `--stream-interval-ms 0`: both send one chunk per token.
- `added_ms_*`: the time to the first byte of the body through the router, less the same directly at
  an engine; open loop, 200 requests/s over 32 connections, streamed, steps that take no time.

Run: `make bench-router`, or `python -m bench.router [--save]`. Without the peer's environment
(`make peers`) the ratios are null. The load generator, the engines and the router share the cores.
"""

from __future__ import annotations

import asyncio
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import uvloop

from bench.load import Answer, closed_loop, open_loop, post
from bench.report import only_save, publish, spread, table
from bench.router_peers import Deployment, Process, deployed

TOKENS = 32
PROMPT = "Tell me, in thirty-two tokens, about the fox and the dog: "  # and 6 digits: 64 bytes
CONNECTIONS = 32
REPEATS = 5
STEP_MS = 5
RATE = 200.0


@dataclass(frozen=True, slots=True)
class Work:
    """One kind of load: the requests and their count."""

    name: str
    stream: bool
    count: int
    warm_up: int = 100


@dataclass(slots=True)
class Cost:
    """CPU µs per request of the router, and of both engines together; one figure per repeat."""

    router: list[float] = field(default_factory=list)
    engines: list[float] = field(default_factory=list)

    def document(self) -> dict[str, dict[str, float]]:
        return {"router": spread(self.router), "engines": spread(self.engines)}


def main() -> None:
    """Measure, print the tables, publish the JSON."""
    only_save(__doc__)
    costs: dict[str, dict[str, Cost]] = {}
    with deployed("--step-ms", "0", "--prefill-tokens-per-ms", "0") as fast:
        for work in (Work("plain", False, 1500), Work("stream_burst", True, 800)):
            costs[work.name] = compare(fast, work)
        delays = added(fast)
    flags = ("--step-ms", str(STEP_MS), "--prefill-tokens-per-ms", "0")
    with deployed(*flags) as paced:
        work = Work("stream_paced", True, 800)
        costs[work.name] = compare(paced, work)
    with deployed(*flags, router_flags=("--stream-interval-ms", "0")) as paced:
        work = Work("stream_paced_each", True, 800)
        costs[work.name] = compare(paced, work)
    table(
        f"CPU of the router per request of {TOKENS} tokens, µs, medians of {REPEATS}",
        ["work", "ours", "spread", "vllm-router", "spread", "ratio"],
        [
            [name, *_cells(cost.get("ours")), *_cells(cost.get("theirs")), str(_ratio(cost))]
            for name, cost in costs.items()
        ],
    )
    table(
        f"time to the first byte over direct, ms, at {RATE:g} requests/s",
        ["router", "p50", "spread", "p99", "spread"],
        [
            [who, *(cell for p in ("p50", "p99") for cell in _cells(figures[p], 2))]
            for who, figures in delays.items()
        ],
    )
    publish(
        "router",
        {
            **{f"cpu_{name}": _ratio(cost) for name, cost in costs.items()},
            **{f"added_ms_{p}": spread(delays["ours"][p])["median"] for p in ("p50", "p99")},
            "cpu_us": {
                name: {who: one.document() for who, one in cost.items()}
                for name, cost in costs.items()
            },
            "added_ms": {
                who: {p: spread(values) for p, values in figures.items()}
                for who, figures in delays.items()
            },
        },
    )


def compare(deployment: Deployment, work: Work) -> dict[str, Cost]:
    """Measure CPU per request of both routers, in turn."""
    costs = {who: Cost() for who in ("ours", "theirs")}
    for repeat in range(REPEATS + 1):
        for who, router in _routers(deployment).items():
            count = work.count if repeat else work.warm_up
            before = router.cpu_s(), sum(engine.cpu_s() for engine in deployment.engines)
            answers = run(closed_loop, router, requests(router, work.stream), count)
            after = router.cpu_s(), sum(engine.cpu_s() for engine in deployment.engines)
            check(answers, stream=work.stream)
            if repeat:
                costs[who].router.append(1e6 * (after[0] - before[0]) / count)
                costs[who].engines.append(1e6 * (after[1] - before[1]) / count)
    return {who: cost for who, cost in costs.items() if cost.router}


def added(deployment: Deployment) -> dict[str, dict[str, list[float]]]:
    """Return the time to the first byte that each router adds to an engine's own, in ms."""
    delays: dict[str, dict[str, list[float]]] = {}
    count = int(RATE * 5)
    for repeat in range(REPEATS + 1):
        direct: dict[str, float] = {}
        for who, server in {"direct": deployment.engines[0], **_routers(deployment)}.items():
            answers = run(open_loop, server, requests(server, True), count, per_s=RATE)
            check(answers, stream=True)
            ranks = statistics.quantiles((1e3 * a.first_byte_s for a in answers), n=100)
            seen = {"p50": ranks[49], "p99": ranks[98]}
            direct = direct or seen
            if repeat and who != "direct":
                figures = delays.setdefault(who, {"p50": [], "p99": []})
                for p in figures:
                    figures[p].append(seen[p] - direct[p])
    return delays


def run(
    loop: Callable[..., Any],
    server: Process,
    requests: Callable[[int], bytes],
    count: int,
    **options: float,
) -> list[Answer]:
    """Put one load on a server and return its answers."""
    load = loop(server.url, requests, count=count, connections=CONNECTIONS, **options)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        answers: list[Answer] = runner.run(load)
    return answers


def requests(server: Process, stream: bool) -> Callable[[int], bytes]:
    """Return a function of a request's number. Requests differ in the end of the prompt."""
    body = {
        "model": "mock",
        "prompt": PROMPT + "000000",
        "max_tokens": TOKENS,
        "temperature": 0,
        "stream": stream,
    }
    whole = post(server.url, "/v1/completions", json.dumps(body).encode())
    before, _, after = whole.partition(b"000000")
    return lambda number: b"%b%06d%b" % (before, number, after)


def check(answers: list[Answer], *, stream: bool) -> None:
    """Exit if a response is incomplete: a router that drops tokens would seem cheap."""
    for answer in answers:
        text = answer.body
        if stream:
            events = [
                json.loads(line[6:])["choices"][0]["text"]
                for line in text.split(b"\n")
                if line.startswith(b"data: {")
            ]
            text = "".join(events).encode()
            ended = answer.body.count(b"data: [DONE]") == 1
        else:
            text = json.loads(text)["choices"][0]["text"].encode()
            ended = True
        if answer.status != 200 or not ended or len(text) != TOKENS:
            raise SystemExit(f"a wrong answer, status {answer.status}: {answer.body!r}")


def _routers(deployment: Deployment) -> dict[str, Process]:
    theirs = {"theirs": deployment.theirs} if deployment.theirs else {}
    return {"ours": deployment.ours, **theirs}


def _ratio(cost: dict[str, Cost]) -> float | None:
    if "theirs" not in cost:
        return None
    ours, theirs = (statistics.median(cost[who].router) for who in ("ours", "theirs"))
    return round(ours / theirs, 3)


def _cells(values: Cost | list[float] | None, digits: int = 0) -> list[str]:
    figures = values.router if isinstance(values, Cost) else values
    if not figures:
        return ["-", "-"]
    middle = statistics.median(figures)
    return [f"{middle:.{digits}f}", f"{min(figures):.{digits}f}-{max(figures):.{digits}f}"]


if __name__ == "__main__":
    main()
