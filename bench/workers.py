"""Engines of several workers: throughput, the lead's share, recovery, and swapping.

Purpose: what `--tp`, `--pp` and `--device-pages` gain and cost on two cores.

How: SmolLM2, every worker with one thread. The engines of a comparison run at the same time, and
are measured in turn; a ratio is the median of the repeats' own ratios.

- `pp2_vs_one`: tokens per second of two stages on two cores over those of one process on one core.
  DéjàVu counts the requests of a microbatch, and a pipeline has as many microbatches as stages: so
  `16_each` compares two microbatches of 16 with a batch of 16 (the aim is 1.6). `16_in_all` divides
  the same 16 requests: each stage then reads its weights twice as often per token. `prefill` is one
  prompt of 1200 tokens, whose chunks follow each other through the stages, on an engine that
  divides its layers for prompts (`--role prefill`); `prefill_any` on one that does for decodes.
- `tp2_vs_threads`: two workers that share each layer, over one process with two threads.
- `lead_share`: the share of a step, by the batch, in which no worker of `--tp 2` computes: what the
  lead does between two steps (the aim is at most 0.05 at 32).
- `recovery`: eight streams behind a router, on an engine of two stages. How many times as long they
  take if a worker is killed in the middle, and if the whole engine is: then `up` starts it again,
  and clients send their requests again. `differing` answers are not those without a death.
- `swapping`: four stages whose workers have memory for `DEVICE` pages. Without swapping these are
  the pool; with it, the pool has four times as many. How many times as long a batch of requests
  takes without, by the number of requests. `swapping_predicted` is DéjàVu's inequality (§G.1) with
  the measured time of a token and bandwidth of copies: whether a doubled microbatch pays.

Each part has its own document. Run: `make bench-workers`, or `python -m bench.workers [--save]
[--repeats 3] [--dtype float32] [--only splits]`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import torch

from bench.deployment import Deployment, deployed
from bench.engine_calls import tokens
from bench.processes import machine_cpu_s
from bench.report import publish, spread, table
from bench.worker_engines import (
    MODEL,
    Running,
    decode_rate,
    makespan,
    prefill_rate,
    running,
    worker_share,
)
from router.planning import swapping_helps

POOL = ("--pool-pages", "1600", "--max-batch", "64")
SPLITS = {
    "one": ("--cpus", "0"),
    "pp 2": ("--pp", "2", "--cpus", "0,1"),
    "pp 2, prefill": ("--pp", "2", "--cpus", "0,1", "--role", "prefill"),
    "two threads": ("--cpus", "0,1"),
    "tp 2": ("--tp", "2", "--cpus", "0,1"),
}
LEAD_BATCHES = (8, 32)
STREAMS, OUTPUT, KILLED_AT, RECOVERY_PROMPT = 8, 96, 0.5, 200
RETRY_S = 0.1
DEVICE, STAGES = 120, 4
SWAP_REQUESTS, SWAP_PROMPT, SWAP_OUTPUT = (8, 24), 160, 64
KV_BYTES = 30 * 2 * 3 * 64  # elements of a token in all layers of SmolLM2


def main() -> None:
    """Measure, print the tables, publish the JSON."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--dtype", default="float32")
    options.add_argument("--save", action="store_true")
    options.add_argument("--only", choices=["splits", "lead", "recovery", "swapping"])
    given = options.parse_args()
    parts = {"splits": splits, "lead": lead, "recovery": recovery, "swapping": swapping}
    for name, part in parts.items():
        if given.only not in (None, name):
            continue
        began, before = time.monotonic(), machine_cpu_s()
        figures = part(given.repeats, given.dtype)
        publish(f"workers_{name}", {
            **figures, "dtype": given.dtype, "repeats": given.repeats,
            "minutes": round((time.monotonic() - began) / 60, 1),
            "all_cpu_s": round(machine_cpu_s() - before, 1),
        })  # fmt: skip


def splits(repeats: int, dtype: str) -> dict[str, Any]:
    """Compare the throughput of splits."""
    rates: dict[tuple[str, str], list[float]] = {}
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(running(*flags, *POOL, "--dtype", dtype))
            for name, flags in SPLITS.items()
        }
        for engine in engines.values():  # what is compiled or allocated at first use
            decode_rate(engine, 4)
            prefill_rate(engine)
        for _ in range(repeats):
            for name, engine in engines.items():
                for batch in (16, 32) if name != "pp 2, prefill" else ():
                    rates.setdefault((name, str(batch)), []).append(decode_rate(engine, batch))
                rates.setdefault((name, "prefill"), []).append(prefill_rate(engine))

    def ratio(over: tuple[str, str], under: tuple[str, str]) -> dict[str, float]:
        return spread([a / b for a, b in zip(rates[over], rates[under], strict=True)])

    table(
        f"{MODEL}, {dtype}, tokens/s", ["", "16 streams", "32 streams", "prefill"],
        [[name, *(f"{statistics.median(rates[name, of]):.0f}" if (name, of) in rates else ""
                  for of in ("16", "32", "prefill"))] for name in SPLITS],
    )  # fmt: skip
    return {
        "pp2_vs_one": {
            "16_each": ratio(("pp 2", "32"), ("one", "16")),
            "16_in_all": ratio(("pp 2", "16"), ("one", "16")),
            "32_in_all": ratio(("pp 2", "32"), ("one", "32")),
            "prefill": ratio(("pp 2, prefill", "prefill"), ("one", "prefill")),
            "prefill_any": ratio(("pp 2", "prefill"), ("one", "prefill")),
        },
        "tp2_vs_threads": {
            of: ratio(("tp 2", of), ("two threads", of)) for of in ("16", "32", "prefill")
        },
        "tokens_per_s": {f"{name}, {of}": spread(each) for (name, of), each in rates.items()},
    }


def lead(repeats: int, dtype: str) -> dict[str, Any]:
    """Measure what the lead takes of a step."""
    with running(*SPLITS["tp 2"], *POOL, "--dtype", dtype) as engine:
        decode_rate(engine, 4)
        shares = {
            str(batch): spread([1 - worker_share(engine, batch) for _ in range(repeats)])
            for batch in LEAD_BATCHES
        }
    table(
        "share of a step in which no worker computes", ["streams", "share"],
        [[batch, f"{share['median']:.1%}"] for batch, share in shares.items()],
    )  # fmt: skip
    return {"lead_share": shares}


def recovery(repeats: int, dtype: str) -> dict[str, Any]:
    """Compare a run without a death to one with a dead worker and one with a dead engine."""
    took: dict[str, list[float]] = {"none": [], "worker": [], "engine": []}
    differing = 0
    flags = ("--engines", "1", "--pp", "2", "--pool-pages", "600", "--dtype", dtype)
    prompts = [tokens(RECOVERY_PROMPT) for _ in range(STREAMS)]
    with deployed(MODEL, *flags) as deployment:
        wanted = asyncio.run(streams(deployment, prompts, ""))[1]
        for repeat in range(repeats):
            for dies, times in took.items():
                own = [[5000 + 10 * repeat + len(dies), *prompt[1:]] for prompt in prompts]
                seconds, answers = asyncio.run(streams(deployment, own, dies))
                times.append(seconds)
                again = asyncio.run(streams(deployment, own, ""))[1]
                differing += sum(a != b for a, b in zip(answers, again, strict=True))
    ratios = {
        f"{dies}_vs_none": spread([a / b for a, b in zip(took[dies], took["none"], strict=True)])
        for dies in ("worker", "engine")
    }
    table(
        f"{STREAMS} streams of {RECOVERY_PROMPT} + {OUTPUT} tokens", ["what dies", "s", "ratio"],
        [[dies, f"{statistics.median(times):.1f}",
          f"{ratios[f'{dies}_vs_none']['median']:.2f}" if dies != "none" else ""]
         for dies, times in took.items()],
    )  # fmt: skip
    return {
        "recovery": {**ratios, "seconds": {dies: spread(each) for dies, each in took.items()}},
        "recovery_vs_restart": spread(
            [a / b for a, b in zip(took["worker"], took["engine"], strict=True)]
        ),
        "differing": differing,
        "compared": 3 * repeats * len(wanted),
    }


async def streams(
    deployment: Deployment, prompts: list[list[int]], dies: str
) -> tuple[float, list[list[int]]]:
    """Return how long the streams take, and their tokens; one process dies in the middle.

    A request that fails because the engine died is sent again.
    """
    answers: list[list[int]] = [[] for _ in prompts]
    waiting = [dies] if dies in ("worker", "engine") else []

    async def one(number: int) -> bool:
        """Return whether the stream has ended as it should."""
        answers[number] = []
        body = {
            "model": MODEL, "prompt": prompts[number], "max_tokens": OUTPUT, "temperature": 0,
            "stream": True, "ignore_eos": True, "return_token_ids": True,
        }  # fmt: skip
        url = f"{deployment.url}/v1/completions"
        async with client.stream("POST", url, json=body, timeout=600) as reply:
            async for line in reply.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    if dies == "engine":
                        return False
                    raise SystemExit(f"a stream failed: {event}")
                answers[number] += event["choices"][0].get("token_ids") or []
                if waiting and sum(map(len, answers)) > KILLED_AT * OUTPUT * len(prompts):
                    kill(deployment, waiting.pop())
        return len(answers[number]) == OUTPUT

    async def until_done(number: int) -> None:
        while not await one(number):  # noqa: ASYNC110
            await asyncio.sleep(RETRY_S)

    async with httpx.AsyncClient() as client:
        began = time.perf_counter()
        await asyncio.gather(*map(until_done, range(len(prompts))))
        return time.perf_counter() - began, answers


def kill(deployment: Deployment, what: str) -> None:
    """Send SIGKILL to the first engine, or to its last worker."""
    headers = {"Authorization": f"Bearer {deployment.engine_key}"}
    url = f"{deployment.engines[0]}/microserving/state"
    state = httpx.get(url, headers=headers, timeout=60).json()
    victim = state["workers"][-1]["pid"]
    if what == "engine":  # workers are forked from a child of it
        victim = parent_of(parent_of(victim))
    os.kill(victim, signal.SIGKILL)


def parent_of(pid: int) -> int:
    """Return the process that has started `pid`."""
    stat = Path(f"/proc/{pid}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[1])


def swapping(repeats: int, dtype: str) -> dict[str, Any]:
    """Compare batches with and without swapping."""
    flags = ("--pp", str(STAGES), "--max-batch", "64", "--dtype", dtype)
    took: dict[tuple[str, int], list[float]] = {}
    with ExitStack() as stack:
        engines = {
            "without": stack.enter_context(running(*flags, "--pool-pages", str(DEVICE))),
            "with": stack.enter_context(
                running(*flags, "--pool-pages", str(4 * DEVICE), "--device-pages", str(DEVICE))
            ),
        }
        for engine in engines.values():
            makespan(engine, [tokens(SWAP_PROMPT)], 8)
        for _ in range(repeats):
            for count in SWAP_REQUESTS:
                prompts = [tokens(SWAP_PROMPT) for _ in range(count)]
                for name, engine in engines.items():
                    took.setdefault((name, count), []).append(
                        makespan(engine, prompts, SWAP_OUTPUT)
                    )
        workers = engines["with"].state()["workers"]
        computing = sum(worker["computing_ms"] for worker in workers)
        waited = sum(worker["swap_wait_ms"] for worker in workers)
        token_s = one_token(engines["with"])
    gains = {
        str(count): spread(
            [a / b for a, b in zip(took["without", count], took["with", count], strict=True)]
        )
        for count in SWAP_REQUESTS
    }
    table(
        f"{STAGES} stages with memory for {DEVICE} pages",
        ["requests", "without, s", "with, s", "gain"],
        [[str(count), *(f"{statistics.median(took[name, count]):.1f}" for name in engines),
          f"{gains[str(count)]['median']:.2f}"] for count in SWAP_REQUESTS],
    )  # fmt: skip
    fit = DEVICE * 16 // (SWAP_PROMPT + SWAP_OUTPUT) // STAGES  # requests of a microbatch
    size = 4 if dtype == "float32" else 2
    kv_bytes = fit * KV_BYTES * size / STAGES
    bandwidth = copy_bandwidth(dtype)
    return {
        "swapping": gains,
        "swapping_seconds": {f"{name}, {count}": spread(s) for (name, count), s in took.items()},
        "swapping_predicted": swapping_helps(
            token_s, SWAP_OUTPUT, SWAP_PROMPT, kv_bytes, bandwidth
        ),
        "swapping_waited": round(waited / (computing + waited), 3),
        "token_s": round(token_s, 4),
        "copy_gb_per_s": round(bandwidth / 1e9, 2),
    }


def one_token(engine: Running) -> float:
    """Return the time of a stage for a token of a few streams, in seconds."""
    before = engine.state()["workers"][0]["computing_ms"]
    makespan(engine, [tokens(SWAP_PROMPT)], 33)
    after = engine.state()["workers"][0]["computing_ms"]
    makespan(engine, [tokens(SWAP_PROMPT)], 1)
    prompt = engine.state()["workers"][0]["computing_ms"] - after
    return float(after - before - prompt) / 32 / 1e3


def copy_bandwidth(dtype: str) -> float:
    """Return how fast pages are gathered, in bytes per second."""
    elements = 16 * KV_BYTES // STAGES
    pages = torch.zeros((DEVICE, elements), dtype=getattr(torch, dtype))
    chosen = torch.randperm(DEVICE)[: DEVICE // 2]
    out = torch.zeros((len(chosen), elements), dtype=pages.dtype)
    torch.set_num_threads(1)
    times = []
    for _ in range(20):
        began = time.perf_counter()
        torch.index_select(pages, 0, chosen, out=out)
        times.append(time.perf_counter() - began)
    return out.nbytes / statistics.median(times)


if __name__ == "__main__":
    main()
