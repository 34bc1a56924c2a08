"""Two vLLM engines behind the router's strategies, against vLLM asked directly.

Purpose: what it costs to have the serving strategy in the router where the engines are vLLM's
(`--backend vllm`), and what it gains.

How: SmolLM2, two engines of one thread on a core each, as vLLM compiles them. The same pair serves
every strategy. Beside it are two of vLLM's own OpenAI servers on the same cores, which are stopped
while they are not measured. The sides alternate within a repeat; a ratio is the median of the
repeats' own ratios.

- `router_vs_direct_tpot`: time per output token of `STREAMS` streams at a time, through the router
  under `data_parallel`, over that of the two servers asked directly. The aim is at most 1.03.
- `migrate_vs_recompute`: prompts of 1000 and 3000 tokens of which all but 500 are cached on the
  other engine: time to first token if everything is computed, over that if the cached part is
  migrated.
- `load`: mean JCT and TTFT of each strategy under Poisson arrivals of `bench.balance`'s lengths for
  Figure 11, at `SHARE` of 1P1D's throughput, over those of `data_parallel`; vLLM's two servers
  beside.
- Time to first token under 1P1D, and 1P1D by vLLM alone: `bench.vllm_disagg`.
- `differing`: greedy answers in float32 under a strategy that differ from those of one engine,
  one request at a time, and `failed`: requests of all runs that failed.

Run: `make bench-vllm-fleet`, or `python -m bench.vllm_fleet [--save] [--repeats 3]`. It takes some
twenty minutes, of which vLLM compiles for a few.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx

from bench.balance_arms import STRATEGIES, Arm, Ours, vllm_arm
from bench.deployment import Deployment, deployed
from bench.engine_calls import Engine, send, tokens, unused_id
from bench.peer_vllm import PYTHON
from bench.processes import cpu_s, machine_cpu_s, tree_cpu_s
from bench.real_load import TIMES, unseen_requests
from bench.report import publish, spread, table
from router.load.client import Outcome
from router.workload import WorkloadConfig

MODEL = "smollm2"
BLOCK = 32  # tokens
ENGINES = ("--prefill", "1", "--decode", "1", "--pool-pages", "1024")
VLLM = (f"--vllm-args=--block-size {BLOCK}",)
CACHED = {1000: 512, 3000: 2496}  # tokens of the prompt that are cached elsewhere, by its length
STREAMS = WorkloadConfig("fixed", input=32, output=64)
STREAMS_AT_A_TIME = 16
LOAD = WorkloadConfig("paper", input=384, output=80)
LOADED = ("data parallel", "1P1D", "balanced 0.2", "balanced auto")
SHARE = 0.75
REQUESTS = 32
FULL = 24
TIMES_EACH = 3  # repetitions of a single request within a repeat
IDENTITY = tuple(STRATEGIES)


def main() -> None:
    """Measure, print the tables, publish the JSON."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--dtype", default="bfloat16")
    options.add_argument("--save", action="store_true")
    given = options.parse_args()
    if not PYTHON.exists():
        raise SystemExit("this needs vLLM: make bench-vllm-fleet installs it")
    began, before = time.monotonic(), machine_cpu_s()
    differing, compared = identity()
    with ExitStack() as stack:
        deployment = stack.enter_context(fleet(given.dtype))
        ours = Ours(deployment, MODEL, LOADED)
        peers = stack.enter_context(vllm_arm(MODEL, given.dtype))
        if peers is None:
            raise SystemExit("this needs vLLM: make bench-vllm-fleet installs it")
        roots = [os.getpid(), *deployment.pids, *(server.pid for server in peers.servers)]
        own_began, own_before = time.monotonic(), sum(map(tree_cpu_s, roots[1:]))
        machine_before, this_before = machine_cpu_s(), cpu_s(roots[0])
        moved = [migrations(deployment, swap=bool(n % 2)) for n in range(given.repeats)]
        arms: dict[str, Arm] = {"ours": ours, "vLLM": peers}
        tpot = [asyncio.run(streams(arms, first=bool(n % 2))) for n in range(given.repeats)]
        rate = asyncio.run(rate_of(ours))
        sides = {name: (arms["ours"], name) for name in LOADED} | {"vLLM": (peers, "data parallel")}
        load = asyncio.run(loaded(sides, rate, given.repeats))
        own = sum(map(tree_cpu_s, roots[1:])) - own_before + cpu_s(roots[0]) - this_before
        others = (machine_cpu_s() - machine_before - own) / (time.monotonic() - own_began)
    results = {
        "router_vs_direct_tpot": spread([each["ours"] / each["vLLM"] for each in tpot]),
        "tpot_ms": {name: spread([each[name] * 1e3 for each in tpot]) for name in arms},
        "migrate_vs_recompute": {
            str(length): spread([each[length] for each in moved]) for length in CACHED
        },
        "load": load,
        "rate": round(rate, 3),
        "differing": differing,
        "compared": compared,
        "failed": 0,  # a request that fails ends the bench
        "others_cpu": round(max(others, 0.0), 3),
        "minutes": round((time.monotonic() - began) / 60, 1),
        "all_cpu_s": round(machine_cpu_s() - before, 1),
    }
    show(results)
    publish("vllm_fleet", results)


@contextmanager
def fleet(dtype: str, *more: str) -> Iterator[Deployment]:
    """Run the two engines and their router."""
    flags = (MODEL, "--backend", "vllm", "--dtype", dtype, *ENGINES, *VLLM, *more)
    with deployed(*flags, python=str(PYTHON)) as deployment:
        yield deployment


def identity() -> tuple[int, int]:
    """Return how many greedy answers in float32 differ from one engine's, and of how many."""
    differing = compared = 0
    with fleet("float32") as deployment:
        prompts = [tokens(length) for length in (40, 171, 333, 512, 700)]
        for name in IDENTITY:
            found = []
            for used in (name, "data parallel"):
                strategy, params = STRATEGIES[used]
                deployment.use(strategy, **params)
                found.append([complete(deployment, prompt) for prompt in prompts])
            compared += len(prompts)
            differing += sum(ours != alone for ours, alone in zip(*found, strict=True))
    return differing, compared


def complete(deployment: Deployment, prompt: list[int]) -> list[int]:
    """Return the token ids of a greedy answer."""
    body = {
        "model": MODEL, "prompt": prompt, "max_tokens": 32, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True,
    }  # fmt: skip
    reply = httpx.post(f"{deployment.url}/v1/completions", json=body, timeout=600)
    reply.raise_for_status()
    ids: list[int] = reply.json()["choices"][0]["token_ids"]
    return ids


def migrations(deployment: Deployment, *, swap: bool) -> dict[int, float]:
    """Return, by length, how many times as long the first token takes if all is computed."""
    pids = deployment.pids[1:]
    engines = [
        Engine(url, pid, deployment.engine_key)
        for url, pid in zip(deployment.engines, pids, strict=True)
    ]
    owner, other = reversed(engines) if swap else engines
    ratios = {}
    for length, cached in CACHED.items():
        migrated, computed = [], []
        for _ in range(TIMES_EACH):
            prompt = tokens(length)
            owner.generate(prompt[:cached], 1)
            began = time.perf_counter()
            lease, _sent = send(owner, other, unused_id(), prompt, cached)
            other.call("commit", lease_id=lease["lease_id"])
            moved_ms = (time.perf_counter() - began) * 1e3
            migrated.append(moved_ms + other.generate(prompt, 1)[0])
            computed.append(other.generate(tokens(length), 1)[0])
        ratios[length] = statistics.median(computed) / statistics.median(migrated)
    return ratios


async def streams(arms: dict[str, Arm], *, first: bool) -> dict[str, float]:
    """Return each arm's mean time per token under a batch of streams, in seconds."""
    found = {}
    for name in sorted(arms, reverse=first):
        await arms[name].run("data parallel", list(unseen_requests(STREAMS, 4)))  # warm
        requests = [*unseen_requests(STREAMS, STREAMS_AT_A_TIME)]
        outcomes = await arms[name].run("data parallel", requests)
        found[name] = mean(outcomes, "tpot")
    return found


async def rate_of(ours: Ours) -> float:
    """Return `SHARE` of 1P1D's throughput, in requests per second."""
    return SHARE * await ours.saturate("1P1D", list(unseen_requests(LOAD, 2 * FULL)), FULL)


async def loaded(
    sides: dict[str, tuple[Arm, str]], rate: float, repeats: int, requests: int = REQUESTS
) -> dict[str, dict[str, Any]]:
    """Return the times of each side, an arm and its strategy, over those of the first one."""
    workload = WorkloadConfig(LOAD.name, input=LOAD.input, output=LOAD.output, rate=rate)
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for number in range(repeats):
        for name in [*list(sides)[number % len(sides) :], *list(sides)[: number % len(sides)]]:
            arm, strategy = sides[name]
            outcomes = await arm.run(strategy, [*unseen_requests(workload, requests)])
            runs[name].append({time_: mean(outcomes, time_) for time_ in ("jct", "ttft", "tpot")})
    first, *_ = sides
    return {
        name: {
            **{
                f"{time_}_over_{first.replace(' ', '_')}": spread(
                    [one[time_] / other[time_] for one, other in zip(of, runs[first], strict=True)]
                )
                for time_ in ("jct", "ttft")
            },
            **{f"{time_}_ms": spread([one[time_] * 1e3 for one in of]) for time_ in of[0]},
        }
        for name, of in runs.items()
    }


def mean(outcomes: Sequence[Outcome], name: str) -> float:
    """Return the mean of one of `TIMES`. Raises `SystemExit` if a request failed."""
    if wrong := [outcome for outcome in outcomes if not outcome.ok]:
        raise SystemExit(f"{len(wrong)} requests failed: {wrong[0].status} {wrong[0].error}")
    return statistics.fmean(value for one in outcomes if (value := TIMES[name](one)) is not None)


def show(results: dict[str, Any]) -> None:
    """Print the tables."""
    heads = ["", "median", "from", "to"]

    def row(name: str, each: dict[str, float]) -> list[str]:
        return [name, *(f"{each[of]:.2f}" for of in ("median", "min", "max"))]

    rows = [row("router_vs_direct_tpot", results["router_vs_direct_tpot"])]
    rows += [
        row(f"migrated, of {length} tokens", each)
        for length, each in results["migrate_vs_recompute"].items()
    ]
    table(f"{MODEL} on two vLLM engines", heads, rows)
    rows = [row(name, each["jct_over_data_parallel"]) for name, each in results["load"].items()]
    table(f"mean JCT over data parallel's, {results['rate']}/s", heads, rows)
    print(
        f"{results['differing']} of {results['compared']} answers differ, others used "
        f"{results['others_cpu']} of a core, {os.cpu_count()} cores",
        file=sys.stderr,
    )


if __name__ == "__main__":
    main()
