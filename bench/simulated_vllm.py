"""Virtual engines against real runs of vLLM that others have measured.

Purpose: how far a simulation is from an engine that is not ours, on machines that we do not have.
What vLLM does between its kernels is fitted to two runs; two others are predicted without touching
anything. The aim for these is a mean TPOT within 5 % and a mean TTFT within 15 %.

Theory: a step takes the sum of its kernels (the shipped profiles), a constant, and something for
each sequence that decodes. Under load, TTFT is mostly the wait for a place in the batch, which adds
up the errors of all steps before it: it is the difference of two large times, and is off by more
than they are. Short percentiles of TTFT say little in seconds where nothing waits.

How: LLMServingSim publishes four runs of vLLM 0.19 with 300 requests of ShareGPT each, about ten a
second, with the times at which vLLM's core got each request and gave its first and last token. A
virtual engine gets the same numbers of tokens at the same times, with vLLM's limits of a step and
no limit on what prompts add to decodes. Prompts have no common prefix. The two constants of all
engines minimise the squares of the relative errors of the mean TTFT and TPOT of both runs of Llama
(Gauss-Newton from zero, not negative). Qwen3-32B on two devices and Qwen3-30B-A3B on two, with
DP=2 and EP=2, are the predictions; the latter is one virtual engine with the limits of both ranks.

What the virtual scheduler does otherwise than vLLM's: of the prompt tokens of a step, half go to
the oldest prompt and half to the one with the least left, where vLLM takes prompts in order; a
prompt of which a part is computed gets pages for all of it. In both the youngest generation is
preempted, and recomputed later; here it may find its own pages in the prefix cache.

Run: `make bench-simulated-vllm LLMSERVINGSIM=PATH`, or `python -m bench.simulated_vllm PATH
[--save]`, with the `bench/examples` of casys-kaist/LLMServingSim (MIT).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.report import publish, table
from engine.latency import Profile, TableLatency, find_profile
from engine.protocol import EngineConfig, Extend, StartGenerate
from engine.virtual import VirtualEngine, VirtualLoop, VirtualNetwork

# Their folders, our profiles. The first two are fitted, the others predicted.
RUNS = (
    ("RTX4090/Llama-3.1-8B", "llama-3.1-8b@rtx4090"),
    ("RTXPRO6000/Llama-3.1-8B", "llama-3.1-8b@rtx-pro-6000"),
    ("RTXPRO6000/Qwen3-32B", "qwen3-32b@rtx-pro-6000:tp2"),
    ("RTXPRO6000/Qwen3-30B-A3B-Instruct-2507", "qwen3-30b-a3b@rtx-pro-6000:dp2"),
)
FITTED = 2
ROUNDS = 2  # of Gauss-Newton
PROBE = (1.0, 0.02)  # ms for each step, and for each sequence: to measure their effect
AIMS = {"tpot": 0.05, "ttft": 0.15}
STATISTICS = ("mean", "p50", "p90", "p99")


class Overhead(NamedTuple):
    """What comes on top of a step's kernels, in milliseconds."""

    step_ms: float
    sequence_ms: float


class Times(NamedTuple):
    """Of one request, in seconds."""

    ttft: float
    tpot: float
    jct: float


@dataclass(frozen=True)
class Run:
    """A run of vLLM: each request's arrival, prompt tokens, output tokens and times."""

    name: str
    profile: Profile
    most_sequences: int
    most_tokens: int
    requests: tuple[tuple[float, int, int], ...]
    times: tuple[Times, ...]


def read(folder: Path, name: str, profile: str) -> Run:
    """Read a run."""
    settings = json.loads((folder / name / "vllm/meta.json").read_text())["engine_kwargs"]
    rows = [json.loads(line) for line in (folder / name / "vllm/requests.jsonl").open()]
    first = min(row["queued_ts"] for row in rows)
    ranks = settings["data_parallel_size"]
    return Run(
        name,
        find_profile(profile),
        ranks * settings["max_num_seqs"],
        ranks * settings["max_num_batched_tokens"],
        tuple((row["queued_ts"] - first, row["input_toks"], row["output_toks"]) for row in rows),
        tuple(
            times(row["queued_ts"], row["first_token_ts"], row["last_token_ts"], row["output_toks"])
            for row in rows
        ),
    )


def times(queued: float, first: float, last: float, tokens: int) -> Times:
    """Return a request's times, from the moments of its arrival and its first and last token."""
    return Times(first - queued, (last - first) / max(tokens - 1, 1), last - queued)


def slowed(profile: Profile, overhead: Overhead) -> Profile:
    """Return the profile with the overhead in its table."""
    step = profile.step
    if not isinstance(step, TableLatency):
        raise TypeError(f"{profile.name} has no table")
    rows = tuple((tokens, ms + overhead.step_ms) for tokens, ms in step.rows)
    sequences = tuple((n, ms + overhead.sequence_ms * n) for n, ms in step.sequences)
    return replace(profile, step=replace(step, rows=rows, sequences=sequences))


def simulate(run: Run, overhead: Overhead) -> tuple[list[Times], int]:
    """Return the times of the same requests on a virtual engine, and its preemptions."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(replay(run, slowed(run.profile, overhead)))


async def replay(run: Run, profile: Profile) -> tuple[list[Times], int]:
    """Send a run's requests to a virtual engine."""
    config = EngineConfig(
        engine_id="vllm",
        token_budget=run.most_tokens,
        max_batch=run.most_sequences,
        max_waiting=len(run.requests),
        decode_slowdown=0.0,
    )
    engine = VirtualEngine(config, profile, VirtualNetwork(), {}, no_lease)
    loop, rng = asyncio.get_running_loop(), random.Random(0)
    prompts = [[rng.randrange(10, 999) for _ in range(count)] for _, count, _ in run.requests]

    async def send(number: int) -> Times:
        at, _, tokens = run.requests[number]
        await asyncio.sleep(at - loop.time())
        queued = loop.time()
        call = StartGenerate(
            request_id=str(number),
            prompt=prompts[number],
            max_tokens=tokens,
            stream_tokens=tokens,  # events after the first token and at the end
        )
        stream = await engine.start_generate(call)
        event = await stream.next()
        first = loop.time()
        while event.finish_reason is None:
            event = await stream.next()
        return times(queued, first, loop.time(), tokens)

    async with asyncio.TaskGroup() as group:
        sent = [group.create_task(send(number)) for number in range(len(run.requests))]
    return [task.result() for task in sent], engine.scheduler.preemptions


async def no_lease(url: str, call: Extend) -> str:
    """There is no other engine whose leases could grow."""
    raise AssertionError(f"{url}: {call}")


def fit(runs: Sequence[Run]) -> Overhead:
    """Return the overhead that brings the mean TTFT and TPOT of the runs nearest to vLLM's."""

    def errors(at: Overhead) -> np.ndarray[Any, np.dtype[np.float64]]:
        found = []
        for run in runs:
            simulated = simulate(run, at)[0]
            found += [error(run.times, simulated, kind, "mean") for kind in AIMS]
        print(f"step {at.step_ms:.3f} ms, sequence {at.sequence_ms:.4f} ms: errors", *(
            f"{each:+.2%}" for each in found
        ), flush=True)  # fmt: skip
        return np.array(found)

    best = Overhead(0.0, 0.0)
    now = errors(best)
    for _ in range(ROUNDS):
        changed = [
            errors(best._replace(step_ms=best.step_ms + PROBE[0])),
            errors(best._replace(sequence_ms=best.sequence_ms + PROBE[1])),
        ]
        slopes = np.stack(
            [(there - now) / probe for there, probe in zip(changed, PROBE, strict=True)], axis=1
        )
        tried = nearest(slopes, now - slopes @ np.array(best))
        there = errors(tried)
        if there @ there >= now @ now:
            break
        best, now = tried, there
    return best


def nearest(
    slopes: np.ndarray[Any, np.dtype[np.float64]], at_zero: np.ndarray[Any, np.dtype[np.float64]]
) -> Overhead:
    """Return the x >= 0 that minimises |at_zero + slopes·x|². One of these has all zeros."""
    solved = [np.zeros(2)]
    for columns in ([0], [1], [0, 1]):
        x = np.zeros(2)
        x[columns] = np.linalg.lstsq(slopes[:, columns], -at_zero, rcond=None)[0]
        if x.min() >= 0:
            solved.append(x)
    best = min(solved, key=lambda x: float(np.square(at_zero + slopes @ x).sum()))
    return Overhead(float(best[0]), float(best[1]))


def statistic(values: Sequence[Times], kind: str, name: str) -> float:
    """Return the mean or a percentile of one of the times, in seconds."""
    chosen = [getattr(value, kind) for value in values]
    return (
        statistics.fmean(chosen) if name == "mean" else float(np.percentile(chosen, int(name[1:])))
    )


def error(real: Sequence[Times], simulated: Sequence[Times], kind: str, name: str) -> float:
    """Return the relative error of a statistic."""
    return statistic(simulated, kind, name) / statistic(real, kind, name) - 1


def compared(run: Run, overhead: Overhead) -> dict[str, Any]:
    """Return the statistics of both, in ms, and the relative errors."""
    simulated, preemptions = simulate(run, overhead)
    figures: dict[str, Any] = {"profile": run.profile.name, "preemptions": preemptions}
    for kind in Times._fields:
        figures[kind] = {
            name: {
                "vllm_ms": round(statistic(run.times, kind, name) * 1e3, 2),
                "simulated_ms": round(statistic(simulated, kind, name) * 1e3, 2),
                "error": round(error(run.times, simulated, kind, name), 4),
            }
            for name in STATISTICS
        }
    return figures


def show(title: str, found: dict[str, dict[str, Any]]) -> None:
    """Print what was simulated, with its errors."""
    rows = [
        [name.partition("/")[2] if not index else "", kind.upper()]
        + [
            f"{f[kind][each]['simulated_ms']:.0f} / {f[kind][each]['vllm_ms']:.0f} "
            f"({f[kind][each]['error']:+.1%})"
            for each in STATISTICS
        ]
        for name, f in found.items()
        for index, kind in enumerate(Times._fields)
    ]
    table(title, ["run", "ms", *STATISTICS], rows)


def main() -> None:
    """Fit, predict, print the tables, publish the JSON."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("examples", type=Path, help="bench/examples of LLMServingSim")
    options.add_argument("--save", action="store_true", help="keep the figures in bench/results")
    folder = options.parse_args().examples
    runs = [read(folder, name, profile) for name, profile in RUNS]
    overhead = fit(runs[:FITTED])
    kernels = {run.name: compared(run, Overhead(0.0, 0.0)) for run in runs}
    found = {run.name: compared(run, overhead) for run in runs}
    show("Kernels alone: simulated / vLLM", kernels)
    show(
        f"With {overhead.step_ms:.3f} ms a step and {overhead.sequence_ms:.4f} ms a sequence; "
        f"the first {FITTED} are fitted, the others predicted",
        found,
    )
    within = {
        run.name: {
            kind: abs(found[run.name][kind]["mean"]["error"]) <= aim for kind, aim in AIMS.items()
        }
        for run in runs[FITTED:]
    }
    publish(
        "simulated_vllm",
        {
            "overhead": overhead._asdict(),
            "fitted": [run.name for run in runs[:FITTED]],
            "predicted": [run.name for run in runs[FITTED:]],
            "within_aims": within,
            "kernels_alone": kernels,
            "with_overhead": found,
        },
    )


if __name__ == "__main__":
    main()
