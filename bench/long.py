"""Contexts that do not fit their engine's pool, on pages borrowed from another engine.

Purpose: what distributed attention costs, what it is better than, and what a creditor notices
(Infinite-LLM; IL1 to IL11 of the design).

How: SmolLM2, each engine with one thread on a core of its own, the debtor on one and the creditor
on the other, behind one router that tells the debtor whom it may ask. The sides of a comparison
run one after the other within a repeat, on engines that all live during the whole bench but are
stopped while others are measured. A ratio is the median of the repeats' own ratios.

- `tpot_half_remote_vs_local`: time per output token after a prompt of 6000 tokens, if half of the
  pages are borrowed, over that on an engine whose pool holds everything (the aim is 1.3).
- `ttft_half_remote_vs_local`: the same of the time to first token.
- `lender_tpot`: time per output token of four streams of the creditor's own while the debtor
  decodes after such a prompt, over that while it does not (the aim is 1.2).
- `debtor_beside_ms`: the debtor's time per output token meanwhile: `--lend-compute` bounds what the
  creditor computes for it.
- `neighbour_tpot`: the same ratio while an engine that borrows nothing decodes after such a prompt
  on the other core: what two cores that share a memory cost without any lending.
- `vs_host_tier`, `vs_disk_tier`, `vs_recompute`: several requests at once that fit the pool when
  they start, and outgrow it together as they decode. Output tokens per second with borrowing, over
  those of an engine that moves preempted requests to host memory, to disk, or computes them again.
  The creditor has no requests of its own. `moved_blocks` and `preemptions` show what each side did;
  a side that had to do nothing ends the bench.
- `over_context`: tokens per second of a request, prompt and output, by the length of its prompt,
  with borrowing and on an engine with everything. Without borrowing, lengths beyond the pool are
  refused. (The paper's Figure 7 shows throughput over the length of contexts, for GPUs: there, of
  the largest batch of requests of that length.)

Time per output token is the mean between a request's first and last token; `gap_p99` is that of
single gaps, which shows stalls.

Run: `make bench-long`, or `python -m bench.long [--save] [--repeats 3] [--dtype float32]
[--only price]`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from bench.engine_calls import tokens, unused_id
from bench.report import p99, publish, spread, table
from bench.streams import post_stream
from bench.worker_engines import Running, running
from router.engines.http_client import HttpClient

PAGE, BLOCK = 16, 128  # tokens of a page, and of a block that is moved
LONG, NEW = 6000, 48  # tokens of the prompt and of the output
WHOLE = 560  # pages: all contexts of the bench
HALF = (LONG + NEW) // 2 // PAGE  # pages
POOL = HALF * 8 // 7 + 1  # of a debtor: alone, a long context keeps seven eighths of it
BESIDE, BESIDE_PROMPT = 4, 200  # streams of the creditor, and tokens of their prompts
REQUESTS, EACH, EACH_NEW = 6, 400, 320  # 25 pages each at first, 45 in the end
CONTEXTS = (1000, 2000, 4000, 7000)
PARTS = ("price", "creditor", "tiers", "contexts")
LENGTH = ("--max-model-len", "8192")


@dataclass(frozen=True, slots=True)
class Engines:
    """The engines of the bench. All but those that are measured are stopped."""

    whole: Running
    debtor: Running
    creditor: Running
    tiers: dict[str, Running]

    @contextmanager
    def only(self, *measured: Running) -> Iterator[None]:
        """Let these engines run during the body, and stop the others."""
        others = {each.pid for each in (self.whole, *self.tiers.values())}
        for pid in others - {each.pid for each in measured}:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in others:
                os.kill(pid, signal.SIGCONT)


@dataclass(frozen=True, slots=True)
class Times:
    """When the tokens of one request came, in seconds since it was sent."""

    came: list[float]

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.came[0]

    @property
    def tpot(self) -> float:
        """Mean seconds between two tokens."""
        return (self.came[-1] - self.came[0]) / (len(self.came) - 1)

    @property
    def gaps(self) -> list[float]:
        """Seconds between each two tokens."""
        return [b - a for a, b in zip(self.came, self.came[1:], strict=False)]


def main() -> None:
    """Measure, print the tables, publish the JSON."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--dtype", default="float32")
    options.add_argument("--only", choices=PARTS)
    options.add_argument("--save", action="store_true")
    given = options.parse_args()
    parts = {"price": price, "creditor": creditor, "tiers": tiers, "contexts": contexts}
    figures: dict[str, Any] = {}
    os.environ["MICROSERVE_SECRET"] = secrets.token_hex()  # of all engines
    began = time.monotonic()
    with engines(given.dtype) as all_engines:
        for name, part in parts.items():
            if given.only in (None, name):
                figures |= part(all_engines, given.repeats)
    figures["repeats"] = given.repeats
    figures["pool_tokens"] = POOL * PAGE
    figures["dtype"] = given.dtype
    figures["minutes"] = round((time.monotonic() - began) / 60, 1)
    figures["load_average"] = os.getloadavg()
    publish("long", figures, *([f"--only {given.only}"] if given.only else []))


@contextmanager
def engines(dtype: str) -> Iterator[Engines]:
    """Start all engines and the router."""
    whole = ("--dtype", dtype, *LENGTH, "--pool-pages", str(WHOLE))
    lends = ("--dtype", dtype, *LENGTH, "--pool-pages", str(2 * WHOLE), "--lend-share", "0.7")
    small = ("--dtype", dtype, "--cpus", "0", "--pool-pages", str(POOL))
    with ExitStack() as stack:
        start = stack.enter_context
        folder = start(tempfile.TemporaryDirectory())
        kinds = {
            "host_tier": ("--host-pages", "2048"),
            "disk_tier": ("--disk-pages", "2048", "--disk-dir", folder),
            "recompute": ("--preemption", "recompute"),
        }
        found = Engines(
            whole=start(running(*whole, "--cpus", "0")),
            debtor=start(running(*small, *LENGTH, "--borrow")),
            creditor=start(running(*lends, "--cpus", "1")),
            tiers={name: start(running(*small, *flags)) for name, flags in kinds.items()},
        )
        start(router(found.debtor, found.creditor))
        for engine in (found.whole, found.debtor, found.creditor, *found.tiers.values()):
            asyncio.run(generate(engine, [tokens(100)], 4))  # warm
        yield found


@contextmanager
def router(*members: Running) -> Iterator[None]:
    """Run a router before engines until the body ends; wait until the debtor has creditors."""
    flags = [word for each in members for word in ("--engine", each.url)]
    command = [sys.executable, "-m", "router", "router", "--port", "0", *flags]
    process = subprocess.Popen(command, stdout=sys.stderr)
    try:
        give_up = time.monotonic() + 60
        while not members[0].state()["borrowing"]["creditors"]:
            if process.poll() is not None or time.monotonic() > give_up:
                raise SystemExit("the debtor was told of no creditor")
            time.sleep(0.2)
        yield
    finally:
        process.terminate()
        process.wait()


async def generate(engine: Running, prompts: Sequence[list[int]], count: int) -> list[Times]:
    """Generate `count` tokens after each prompt, all at once."""
    client = HttpClient(engine.url)
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_one(client, prompt, count)) for prompt in prompts]
        return [task.result() for task in tasks]
    finally:
        client.close()


async def _one(client: HttpClient, prompt: list[int], count: int) -> Times:
    began, came = time.perf_counter(), []

    def note(event: dict[str, Any], now: float) -> None:
        came.extend([now - began] * len(event.get("token_ids", ())))

    body = {
        "request_id": unused_id(), "prompt": prompt, "max_tokens": count, "temperature": 0,
        "ignore_eos": True,
    }  # fmt: skip
    await post_stream(client, "/microserving/start_generate", body, note)
    if len(came) != count:
        raise SystemExit(f"{len(came)} of {count} tokens came")
    return Times(came)


def price(fleet: Engines, repeats: int) -> dict[str, Any]:
    """Measure one long context, half of it borrowed, against an engine that holds all of it."""
    samples, away = [], []
    for _ in range(repeats):
        prompt = tokens(LONG)
        with fleet.only(fleet.whole):
            (whole,) = asyncio.run(generate(fleet.whole, [prompt], NEW))
        with fleet.only():
            before = _blocks_away(fleet.debtor)
            (half,) = asyncio.run(generate(fleet.debtor, [prompt], NEW))
            away.append((_blocks_away(fleet.debtor) - before) * BLOCK / (LONG + NEW))
        samples.append((whole, half))
        _note("price", tpot_ms=(whole.tpot * 1e3, half.tpot * 1e3),
              ttft_s=(whole.ttft, half.ttft), away=(away[-1],))  # fmt: skip
    if min(away) < 0.45:
        raise SystemExit(f"only {min(away):.2f} of the context was borrowed: this is to be half")
    found: dict[str, Any] = {
        "tpot_half_remote_vs_local": spread([half.tpot / whole.tpot for whole, half in samples]),
        "ttft_half_remote_vs_local": spread([half.ttft / whole.ttft for whole, half in samples]),
        "borrowed_share": spread(away),
        "gap_p99_ms": {
            "whole": spread([p99(whole.gaps) * 1e3 for whole, _ in samples]),
            "half": spread([p99(half.gaps) * 1e3 for _, half in samples]),
        },
        "tpot_ms": {
            "whole": spread([whole.tpot * 1e3 for whole, _ in samples]),
            "half": spread([half.tpot * 1e3 for _, half in samples]),
        },
    }
    table(f"{LONG} tokens, half of them borrowed", ["", "median", "min", "max"],
          [[name, *(f"{found[name][key]:.2f}" for key in ("median", "min", "max"))]
           for name in ("tpot_half_remote_vs_local", "ttft_half_remote_vs_local")])  # fmt: skip
    return found


def creditor(fleet: Engines, repeats: int) -> dict[str, Any]:
    """Measure what the creditor's own streams notice."""
    lending, neighbour, alone_ms, debtor_ms = [], [], [], []
    for _ in range(repeats):
        with fleet.only():
            alone, beside, debtor = asyncio.run(_beside(fleet, fleet.debtor))
        with fleet.only(fleet.whole):
            before, beside_whole, _ = asyncio.run(_beside(fleet, fleet.whole))
        lending.append(beside / alone)
        neighbour.append(beside_whole / before)
        alone_ms.extend([alone * 1e3, before * 1e3])
        debtor_ms.append(debtor * 1e3)
        _note("creditor", tpot_ms=(alone * 1e3, beside * 1e3),
              neighbour_ms=(before * 1e3, beside_whole * 1e3),
              debtor_ms=(debtor * 1e3,))  # fmt: skip
    found = {
        "lender_tpot": spread(lending),
        "neighbour_tpot": spread(neighbour),
        "lender_over_neighbour": spread(
            [a / b for a, b in zip(lending, neighbour, strict=True)]
        ),
        "lender_alone_ms": spread(alone_ms),
        "debtor_beside_ms": spread(debtor_ms),
    }  # fmt: skip
    table("the creditor's own streams", ["", "median", "min", "max"],
          [[name, *(f"{found[name][key]:.2f}" for key in ("median", "min", "max"))]
           for name in ("lender_tpot", "neighbour_tpot")])  # fmt: skip
    return found


async def _beside(fleet: Engines, other: Running) -> tuple[float, float, float]:
    """Return the time per token of the creditor's streams alone, and beside another's decode.

    The third one is that of the other, meanwhile, on average.
    """
    prompts = [tokens(BESIDE_PROMPT) for _ in range(BESIDE)]
    alone = await generate(fleet.creditor, prompts, NEW)
    client = HttpClient(other.url)
    decoding = asyncio.Event()
    body = {
        "request_id": unused_id(), "prompt": tokens(LONG), "max_tokens": 1500, "temperature": 0,
        "ignore_eos": True,
    }  # fmt: skip

    produced = 0

    def note(event: dict[str, Any], _now: float) -> None:
        nonlocal produced
        produced += len(event.get("token_ids", ()))
        if produced:
            decoding.set()

    stream = asyncio.create_task(post_stream(client, "/microserving/start_generate", body, note))
    try:
        first = asyncio.create_task(decoding.wait())
        await asyncio.wait({first, stream}, return_when=asyncio.FIRST_COMPLETED)
        before, began = produced, time.perf_counter()
        beside = await generate(fleet.creditor, prompts, NEW)
        others = (time.perf_counter() - began) / max(produced - before, 1)
        if stream.done():
            raise SystemExit("the other engine's stream ended before it was measured")
    finally:
        stream.cancel()
        await asyncio.wait({stream})
        client.close()
    return _tpot(alone), _tpot(beside), others


def tiers(fleet: Engines, repeats: int) -> dict[str, Any]:
    """Measure requests that outgrow the pool together."""
    rates: dict[str, list[float]] = {name: [] for name in ("borrow", *fleet.tiers)}
    tpots: dict[str, list[float]] = {name: [] for name in rates}
    gaps: dict[str, list[float]] = {name: [] for name in rates}
    did = {name: {"moved_blocks": 0.0, "preemptions": 0.0} for name in rates}
    for _ in range(repeats):
        prompts = [tokens(EACH) for _ in range(REQUESTS)]
        for name in rates:
            engine = fleet.tiers.get(name, fleet.debtor)
            with fleet.only(engine):
                before = _moves(engine)
                began = time.perf_counter()
                times = asyncio.run(generate(engine, prompts, EACH_NEW))
                rates[name].append(REQUESTS * EACH_NEW / (time.perf_counter() - began))
                for what, count in _moves(engine).items():
                    did[name][what] += count - before[what]
            tpots[name].append(statistics.mean(each.tpot for each in times))
            gaps[name].append(p99([gap for each in times for gap in each.gaps]))
            _note("tiers", **{name: (rates[name][-1], tpots[name][-1] * 1e3, gaps[name][-1] * 1e3,
                                     *did[name].values())})  # fmt: skip
    idle = [name for name, counts in did.items()
            if not counts["moved_blocks" if name == "borrow" else "preemptions"]]  # fmt: skip
    if idle:
        raise SystemExit(f"the requests did not outgrow the pool: nothing to do for {idle}")
    found: dict[str, Any] = {
        f"vs_{name}": spread(
            [a / b for a, b in zip(rates["borrow"], rates[name], strict=True)]
        )
        for name in fleet.tiers
    }  # fmt: skip
    found["tokens_per_s"] = {name: spread(values) for name, values in rates.items()}
    found["tiers_tpot_ms"] = {
        name: spread([each * 1e3 for each in values]) for name, values in tpots.items()
    }
    found["tiers_gap_p99_ms"] = {
        name: spread([each * 1e3 for each in values]) for name, values in gaps.items()
    }
    found["tiers_did"] = did
    table(f"{REQUESTS} requests of {EACH} + {EACH_NEW} tokens",
          ["", "tokens/s", "TPOT (ms)", "p99 of a gap (ms)", "blocks moved", "preempted"],
          [[name, f"{found['tokens_per_s'][name]['median']:.1f}",
            f"{found['tiers_tpot_ms'][name]['median']:.0f}",
            f"{found['tiers_gap_p99_ms'][name]['median']:.0f}",
            *(f"{count:.0f}" for count in did[name].values())] for name in rates])  # fmt: skip
    return found


def contexts(fleet: Engines, repeats: int) -> dict[str, Any]:
    """Measure tokens per second over the length of the context."""
    rates: dict[int, dict[str, list[float]]] = {
        length: {"whole": [], "borrow": []} for length in CONTEXTS
    }
    for _ in range(repeats):
        for length in CONTEXTS:
            prompt = tokens(length)
            for name, engine in (("whole", fleet.whole), ("borrow", fleet.debtor)):
                with fleet.only(*([engine] if name == "whole" else [])):
                    began = time.perf_counter()
                    asyncio.run(generate(engine, [prompt], NEW))
                    rates[length][name].append((length + NEW) / (time.perf_counter() - began))
                _note("contexts", **{name: (length, rates[length][name][-1])})
    found = {
        str(length): {name: spread(values) for name, values in sides.items()}
        for length, sides in rates.items()
    }
    table("tokens per second, by the length of the prompt", ["", "whole", "borrow"],
          [[length, *(f"{sides[name]['median']:.0f}" for name in ("whole", "borrow"))]
           for length, sides in found.items()])  # fmt: skip
    return {"over_context": found}


def _moves(engine: Running) -> dict[str, float]:
    """Return how many blocks have left the engine, and how many requests it has preempted."""
    return {
        "moved_blocks": engine.counted("microserve:moved_blocks"),
        "preemptions": engine.counted("vllm:num_preemptions"),
    }


def _blocks_away(engine: Running) -> float:
    """Return how many blocks have left the engine and have not come home."""
    return engine.counted("microserve:moved_blocks") - engine.counted("microserve:home_blocks")


def _tpot(streams: Sequence[Times]) -> float:
    return statistics.mean(each.tpot for each in streams)


def _note(part: str, **values: tuple[float, ...]) -> None:
    shown = ", ".join(
        f"{name} {' '.join(f'{value:.1f}' for value in some)}" for name, some in values.items()
    )
    print(f"{part}: {shown}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
