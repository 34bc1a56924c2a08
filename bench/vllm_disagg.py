"""1P1D over two vLLM engines, and by vLLM alone: time to first token, and times under load.

Purpose: what it costs to compute a prompt on one vLLM engine and to decode on another, by this
project's calls (`--backend vllm`) and by vLLM's own `NixlConnector` with a proxy beside it
(`bench.nixl_proxy`).

Theory: 1P1D's first token comes later by one step for the prompt's last token on the decode engine,
by what remains of the transfer when the prefill ends, and by the calls between. By vLLM alone, the
decode server fetches the whole KV after the prefill, so the transfer is not overlapped.

How: SmolLM2, two engines of one thread on a core each, as vLLM compiles them, behind the router;
beside them two of vLLM's own servers on the same cores, which are stopped while they are not
measured. The sides alternate within a repeat; a ratio is the median of the repeats' own ratios.

- `first_token`, by the prompt's length: `1p1d_over_one_engine` of each side, one request at a time,
  nothing cached. Here, the aim is at most 1.10. `vllm_over_ours`: vLLM's times over those here.
  `own_step_ms`: from the first token to the second here, which is a step of the decode engine.
- `load`: mean JCT and TTFT of 1P1D under Poisson arrivals of `bench.vllm_fleet`'s lengths, at its
  share of 1P1D's throughput here; those by vLLM alone are also given over those here.

Run: `make bench-vllm-disagg`, or `python -m bench.vllm_disagg [--alone] [--dtype float32]
[--save]`. With `--alone` there are no servers of vLLM's own beside, which take 5 GB. Without
instructions for bfloat16 (AVX-512), vLLM takes half a minute for a prompt: use float32 there.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from contextlib import ExitStack
from typing import Any

import httpx

from bench.balance_arms import STRATEGIES, Arm, Ours
from bench.deployment import Deployment
from bench.engine_calls import tokens
from bench.nixl_arm import Nixl, nixl_arm
from bench.peer_vllm import PYTHON
from bench.processes import cpu_s, machine_cpu_s, running, tree_cpu_s
from bench.report import publish, spread, table
from bench.vllm_fleet import BLOCK, MODEL, fleet, loaded, rate_of

# Tokens of a prompt that nothing has cached, and how often it is sent within a repeat.
LENGTHS = {1000: 3, 3000: 1}
CONTEXT = 4096  # tokens
TOKENS = 8  # of an answer: one event may have several
REQUESTS = 16  # of a run under load
OVER = "1p1d_over_one_engine"
STRATEGY_OF = {"one engine": "data parallel", "1P1D": "1P1D"}
Times = dict[str, dict[str, tuple[float, float]]]  # ms to the first and between two, by side, way


def main() -> None:
    """Measure, print the tables, publish the JSON."""
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--dtype", default="bfloat16")
    options.add_argument("--alone", action="store_true", help="without vLLM's own servers beside")
    options.add_argument("--save", action="store_true")
    given = options.parse_args()
    if not PYTHON.exists():
        raise SystemExit("this needs vLLM: make bench-vllm-disagg installs it")
    began = time.monotonic()
    with ExitStack() as stack:
        deployment = stack.enter_context(fleet(given.dtype))
        nixl: Nixl | None = None
        if not given.alone:
            servers = nixl_arm(MODEL, given.dtype, CONTEXT, "--block-size", str(BLOCK))
            nixl = stack.enter_context(servers)
        ours = Ours(deployment, MODEL, ("1P1D",))
        trees = [*deployment.pids, *(server.pid for server in (nixl.servers if nixl else ()))]
        own_before, all_before, since = own_cpu_s(trees), machine_cpu_s(), time.monotonic()
        found = [
            first_tokens(deployment, nixl, theirs_first=bool(number % 2))
            for number in range(given.repeats)
        ]
        rate = asyncio.run(rate_of(ours))
        sides: dict[str, tuple[Arm, str]] = {"1P1D": (ours, "1P1D")}
        if nixl is not None:
            sides["vLLM"] = (nixl, "1P1D")
        load = asyncio.run(loaded(sides, rate, given.repeats, REQUESTS))
        others = machine_cpu_s() - all_before - (own_cpu_s(trees) - own_before)
        others /= time.monotonic() - since
    results = {
        "first_token": {
            str(length): ratios([each[length] for each in found]) for length in LENGTHS
        },
        "load": load,
        "rate": round(rate, 3),
        "failed": 0,  # a request that fails ends the bench
        "others_cpu": round(max(others, 0.0), 3),
        "minutes": round((time.monotonic() - began) / 60, 1),
    }
    show(results)
    alone = ["--alone"] if given.alone else []
    publish("vllm_disagg", results, f"--dtype {given.dtype}", *alone)


def own_cpu_s(pids: list[int]) -> float:
    """Return the CPU seconds so far of these processes, their descendants and this one."""
    return sum(map(tree_cpu_s, pids)) + cpu_s(os.getpid())


def first_tokens(
    deployment: Deployment, nixl: Nixl | None, *, theirs_first: bool
) -> dict[int, Times]:
    """Return the medians of one repeat, by length."""
    found: dict[int, Times] = {length: {} for length in LENGTHS}
    for side in ("vllm", "ours") if theirs_first else ("ours", "vllm"):
        for length in LENGTHS:
            if side == "ours":
                found[length][side] = by_ours(deployment, length)
            elif nixl is not None:
                found[length][side] = by_vllm(nixl, length)
    return found


def by_ours(deployment: Deployment, length: int) -> dict[str, tuple[float, float]]:
    """Return the times of both ways, which take turns."""
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in STRATEGY_OF}
    for _ in range(LENGTHS[length]):
        for way, strategy in STRATEGY_OF.items():
            name, params = STRATEGIES[strategy]
            deployment.use(name, **params)
            found[way].append(arrivals(deployment.url, MODEL, length))
    return {way: medians(times) for way, times in found.items()}


def by_vllm(nixl: Nixl, length: int) -> dict[str, tuple[float, float]]:
    """Return the same for vLLM's own servers."""
    urls = {"one engine": nixl.engine_url, "1P1D": nixl.url}
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in urls}
    with running(*nixl.servers):
        for url in urls.values():  # warm
            arrivals(url, "peer", 4 * BLOCK)
        for _ in range(LENGTHS[length]):
            for way, url in urls.items():
                found[way].append(arrivals(url, "peer", length))
    return {way: medians(times) for way, times in found.items()}


def arrivals(url: str, model: str, length: int) -> tuple[float, float]:
    """Return the time to the first token of a stream, and from there to the second, in ms."""
    body = {
        "model": model, "prompt": tokens(length), "max_tokens": TOKENS, "temperature": 0,
        "stream": True, "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    with httpx.Client(timeout=600, verify=False) as http:  # made before: that takes 20 ms
        began = time.perf_counter()
        with http.stream("POST", f"{url}/v1/completions", json=body) as reply:
            events = [
                ((time.perf_counter() - began) * 1e3, line)
                for line in reply.iter_lines()
                if line.startswith("data: {")
            ]
    times = [ms for ms, _ in events]
    if reply.status_code != 200 or len(times) < 2:
        raise SystemExit(f"{url}: {reply.status_code}, {[line for _, line in events]}")
    return times[0], times[1] - times[0]


def medians(times: list[tuple[float, float]]) -> tuple[float, float]:
    """Return the median of each part."""
    first, step = zip(*times, strict=True)
    return statistics.median(first), statistics.median(step)


def ratios(runs: list[Times]) -> dict[str, Any]:
    """Return the figures of one length."""
    first = {
        (side, way): [run[side][way][0] for run in runs] for side in runs[0] for way in STRATEGY_OF
    }
    return {
        OVER: {
            side: spread(over(first[side, "1P1D"], first[side, "one engine"])) for side in runs[0]
        },
        "vllm_over_ours": {
            way: spread(over(first["vllm", way], first["ours", way]))
            for way in STRATEGY_OF
            if "vllm" in runs[0]
        },
        "ms": {f"{side}, {way}": spread(times) for (side, way), times in first.items()},
        "own_step_ms": spread([run["ours"]["1P1D"][1] for run in runs]),
    }


def over(values: list[float], others: list[float]) -> list[float]:
    """Return the ratio of each repeat."""
    return [value / other for value, other in zip(values, others, strict=True)]


def show(results: dict[str, Any]) -> None:
    """Print the tables."""
    heads = ["", "median", "from", "to"]

    def row(name: str, each: dict[str, float]) -> list[str]:
        return [name, *(f"{each[of]:.3f}" for of in ("median", "min", "max"))]

    for length, found in results["first_token"].items():
        rows = [
            *(
                row(f"1P1D over one engine, {s}", r)
                for s, r in found["1p1d_over_one_engine"].items()
            ),
            *(row(f"vLLM's over ours, {way}", r) for way, r in found["vllm_over_ours"].items()),
            *(row(f"ms, {name}", r) for name, r in found["ms"].items()),
            row("ms, from first to second token, ours", found["own_step_ms"]),
        ]
        table(f"first token of {length} tokens", heads, rows)
    rows = [
        row(f"{name}: {key}", each)
        for name, figures in results["load"].items()
        for key, each in figures.items()
    ]
    table(f"1P1D under {results['rate']}/s", heads, rows)
    print(f"others used {results['others_cpu']} of a core", file=sys.stderr)


if __name__ == "__main__":
    main()
