"""Simulations against real engines of this project.

Purpose: how far a simulation is from what it stands for. The aim is that mean and P99 of TTFT, TPOT
and JCT are within 15 % of the real ones, for every strategy and rate.

How: two engines of SmolLM2 on a core each, one thread, behind a router, on this machine. First they
serve a mix of requests, so that their own statistics cover steps of many sizes. Then each strategy
gets the same requests at each rate (`WORKLOAD`; Poisson arrivals; shares of the throughput of both
engines when they are full), from a client on the same machine. After each run a latency model is
fitted to each engine's statistics (`engine.latency.fit_observed`), as `microserve advise` does: the
engines keep the latest steps of each size, and the host's speed changes within minutes. The same
workload, with the same arrivals and lengths, then runs in a simulation of these engines. What
requests experienced goes into no simulation. The time of a call that asks for no work is measured
too, while a few requests run (`call_s`): the processes share two cores. Answers repeat one word,
because random prompts would give answers whose text comes a token late now and then: half a
character is held back, which a simulation does not know.

The first `BEFORE` requests of each run, real or simulated, are not counted: an engine that has just
started does not know yet how long its steps take, and gives prompts another share of them. Steps
scatter in the simulation as they did when they were measured.

One run says little where the engines are nearly full: simulations that differ only in the order of
that scatter then differ by a tenth in mean TTFT (`chance`: the least and the most of them over the
figure). So each real run is repeated (`--repeats`), and simulated `DRAWS` times with its own
profiles. `errors` are those of each repeat: the median of its simulations over the real figure.
`error` is their median. `pooled_error` compares the figures of all requests of all repeats, where
one repeat in which the host stood still decides the P99. `repeat` is the real figure of the last
run over that of the first one.
`others_cpu` is the number of cores that other processes used: with more than a few hundredths, a
run says little.

Run: `make bench-simulated-engines`, or `python -m bench.simulated_engines [--save]
[--requests 60] [--repeats 3] [--dtype float32] [--layers 8]`. On a processor that is slow in
bfloat16, a model of fewer layers in float32 has step times like those of SmolLM2 on a faster one.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import httpx

from bench.cut_model import cut_smollm2
from bench.deployment import Deployment, deployed
from bench.processes import machine_cpu_s
from bench.real_load import BODY, TIMES, check, throughput, unseen_requests
from bench.report import publish, table
from engine.latency import (
    Fit,
    Measured,
    Profile,
    PutLatency,
    StepWork,
    fit_observed,
    fit_put,
    scatter_of,
)
from engine.protocol import EngineConfig
from router.engines import HttpClient, Role
from router.load.client import Outcome, Target, open_loop
from router.rollout import Catalog
from router.simulation import Experiment, SimulatedEngine, run_experiment
from router.simulation.experiment import RequestRecord
from router.telemetry import percentile
from router.workload import WorkloadConfig, open_workload

MODEL = "model"  # its name for clients
ENGINES = ("--prefill", "1", "--decode", "1", "--pool-pages", "4096")
POOL_TOKENS = 4096 * 16
STRATEGIES: dict[str, dict[str, Any]] = {
    "data_parallel": {}, "prefill_decode": {}, "balanced": {"ratio": 0.2},
}  # fmt: skip
WORKLOAD = WorkloadConfig(name="fixed", input=192, output=32)
SHARES = (0.3, 0.5, 0.7)  # of data parallel's throughput
FULL = 24  # concurrent requests when that throughput is measured
MIX = ((512, 12), (48, 48), (192, 32))  # tokens of the prompts and answers
CONCURRENT = (FULL, 3)  # requests of the mix at a time
AIM = 0.15
CONNECT_S = 30.0
BEFORE = 30  # requests of a run that do not count
DRAWS = 9  # simulations of each run


class RealRun(NamedTuple):
    """The requests of a run that count, and each engine's profile right after it."""

    outcomes: Sequence[Outcome]
    profiles: Sequence[tuple[Profile, Fit]]


def main() -> None:
    """Measure, simulate, print the table, publish the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=60, help="of each run")
    parser.add_argument("--repeats", type=int, default=3, help="real runs of the same requests")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--layers", type=int, default=0, help="of SmolLM2's; 0: all")
    parser.add_argument("--save", action="store_true")
    flags = parser.parse_args()
    own = ("--served-model-name", MODEL, "--dtype", flags.dtype, *ENGINES)
    with cut_smollm2(flags.layers) as model, deployed(model, *own) as deployment:
        real = asyncio.run(measure(deployment, flags.requests, flags.repeats))
    runs = [
        compare(name, rate, flags.requests, repeats, real["call_s"])
        for (name, rate), repeats in real["runs"].items()
    ]
    rows = [
        [run["strategy"], f"{run['rate']:.2f}", figure, statistic]
        + [f"{run[figure][statistic][key]:.4g}" for key in ("real_ms", "simulated_ms")]
        + [f"{run[figure][statistic][key]:+.1%}" for key in ("error", "pooled_error", "repeat")]
        for run in runs
        for figure in TIMES
        for statistic in ("mean", "p99")
    ]
    heads = [
        "strategy",
        "rate",
        "figure",
        "of",
        "real ms",
        "simulated ms",
        "error",
        "pooled",
        "repeat",
    ]
    table("simulations against real engines", heads, rows)
    publish(
        "simulated_engines",
        {
            **summary(runs, "error"), "pooled": summary(runs, "pooled_error"), "aim": AIM,
            "requests": flags.requests, "repeats": flags.repeats, "draws": DRAWS,
            "layers": flags.layers, "dtype": flags.dtype,
            "call_ms": 1e3 * real["call_s"], "others_cpu": max(real["others_cpu"]), "runs": runs,
            "profiles": [
                {"step": asdict(profile.step), "put": asdict(profile.put), "fit": asdict(fit)}
                for profile, fit in list(real["runs"].values())[-1][-1].profiles
            ],
        },
    )  # fmt: skip


def summary(runs: Sequence[dict[str, Any]], error: str) -> dict[str, Any]:
    """Return how many figures are within the aim, and how far they are off."""
    errors = [abs(r[f][s][error]) for r in runs for f in TIMES for s in ("mean", "p99")]
    return {
        "within_aim": sum(each <= AIM for each in errors), "figures": len(errors),
        "largest_error": max(errors), "median_error": statistics.median(errors),
    }  # fmt: skip


async def measure(deployment: Deployment, requests: int, repeats: int) -> dict[str, Any]:
    """Return the real runs and the time of a call."""
    client = HttpClient(deployment.url, connect_timeout_s=CONNECT_S)
    target = Target(client, MODEL, dict(BODY))
    try:
        for strategy, (number, (tokens_in, tokens_out)), most_at_once in itertools.product(
            ("data_parallel", "prefill_decode"), enumerate(MIX), CONCURRENT
        ):
            deployment.use(strategy)
            mix = replace(WORKLOAD, input=tokens_in, output=tokens_out, seed=1000 + number)
            await full(target, mix, most_at_once, most_at_once + 3)
        deployment.use("data_parallel")
        most = await full(target, replace(WORKLOAD, seed=2000), FULL, 3 * FULL)
        print(f"full: {most:.2f} requests/s", file=sys.stderr)
        load = asyncio.create_task(full(target, replace(WORKLOAD, seed=3000), CONCURRENT[-1], 24))
        call_s = await call_time(deployment, load)
        runs: dict[tuple[str, float], list[RealRun]] = {}
        others: list[float] = []
        for repeat, share, strategy in itertools.product(range(repeats), SHARES, STRATEGIES):
            rate = round(share * most, 3)
            deployment.use(strategy, **STRATEGIES[strategy])
            began, all_s, ours_s = time.perf_counter(), machine_cpu_s(), deployment.cpu_s()
            outcomes = await open_loop(
                target, unseen_requests(workload_at(rate), BEFORE + requests)
            )
            others_s = machine_cpu_s() - all_s - (deployment.cpu_s() - ours_s)
            others.append(max(0.0, others_s / (time.perf_counter() - began)))
            check(outcomes)
            keys = [(url, deployment.engine_key) for url in deployment.engines]
            profiles = [await profile_of(*each) for each in keys]
            runs.setdefault((strategy, rate), []).append(RealRun(outcomes[BEFORE:], profiles))
            print(
                f"real run {repeat}: {strategy} at {rate:g}/s, others_cpu {others[-1]:.2f}",
                file=sys.stderr,
            )
    finally:
        client.close()
    return {"runs": runs, "call_s": call_s, "others_cpu": others}


async def full(target: Target, workload: WorkloadConfig, concurrency: int, count: int) -> float:
    """Run `count` requests, `concurrency` of them at a time; return requests per second."""
    requests = itertools.islice(open_workload(workload).requests, count)
    return await throughput(target, requests, concurrency)


def workload_at(rate: float) -> WorkloadConfig:
    return replace(WORKLOAD, rate=rate, seed=7)


async def call_time(deployment: Deployment, load: asyncio.Task[float]) -> float:
    """Return the mean time of calls that an engine does next to nothing for, during a load."""
    headers = {"Authorization": f"Bearer {deployment.engine_key}"}
    took = []
    async with httpx.AsyncClient(headers=headers) as client:
        while not load.done():
            for url in deployment.engines:
                began = time.perf_counter()
                (await client.get(f"{url}/health")).raise_for_status()
                took.append(time.perf_counter() - began)
                await asyncio.sleep(0.02)
    await load
    return statistics.fmean(took)


async def profile_of(url: str, key: str) -> tuple[Profile, Fit]:
    """Return an engine's profile, from the statistics of its own steps."""
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {key}"}) as client:
        told = (await client.get(f"{url}/microserving/statistics")).json()
        info = (await client.get(f"{url}/microserving/model")).json()
    measured = [Measured(StepWork(*map(int, step[:4])), step[4]) for step in told["steps"]]
    step, fit = fit_observed(measured, told["row_multiple"])
    puts = [(int(size), seconds) for size, seconds in told["puts"]]
    put = fit_put(puts, info["layers"]) if puts else PutLatency(bandwidth=1e10)
    profile = Profile(
        name="own", model=info["name"], device="cpu", gpus=0, source="its own statistics",
        layers=info["layers"], kv_bytes_per_token=info["kv_bytes_per_token"],
        context_length=info["context_length"], pool_tokens=POOL_TOKENS, step=step, put=put,
        scatter=scatter_of(step, measured),
    )  # fmt: skip
    return profile, fit


def simulate(
    name: str, rate: float, requests: int, profiles: Sequence[Profile], call_s: float, seed: int
) -> list[RequestRecord]:
    """Run the same requests in virtual time; `seed` is that of the steps' scatter."""
    roles: tuple[Role, ...] = ("prefill", "decode")
    fleet = tuple(
        SimulatedEngine(EngineConfig(engine_id=f"{role}-0", role=role, pool_pages=4096), profile)
        for role, profile in zip(roles, profiles, strict=True)
    )
    experiment = Experiment(
        Catalog()[name].bind(STRATEGIES[name]), fleet, workload_at(rate), BEFORE + requests,
        call_s=call_s, seed=seed,
    )  # fmt: skip
    return run_experiment(experiment).records[BEFORE:]


def compare(
    name: str, rate: float, requests: int, repeats: Sequence[RealRun], call_s: float
) -> dict[str, Any]:
    """Return each figure of the real requests, of the simulated ones, and the difference."""
    run: dict[str, Any] = {"strategy": name, "params": STRATEGIES[name], "rate": rate}
    simulated = []
    for repeat in repeats:
        profiles = [profile for profile, _ in repeat.profiles]
        draws = [simulate(name, rate, requests, profiles, call_s, seed) for seed in range(DRAWS)]
        simulated.append(draws)
    for figure, of in TIMES.items():
        real = [[of(one) for one in repeat.outcomes] for repeat in repeats]
        ours = [[[of(one) for one in records] for records in draws] for draws in simulated]
        all_real = values(itertools.chain(*real))
        all_ours = values(itertools.chain(*itertools.chain(*ours)))
        run[figure] = {}
        for statistic in ("mean", "p99"):
            measured = [values(one)[statistic] for one in real]
            drawn = [[values(one)[statistic] for one in draws] for draws in ours]
            of_all, of_draws = all_ours[statistic], list(itertools.chain(*drawn))
            errors = [
                statistics.median(draws) / one - 1
                for draws, one in zip(drawn, measured, strict=True)
            ]
            run[figure][statistic] = {
                "real_ms": 1e3 * all_real[statistic],
                "simulated_ms": 1e3 * of_all,
                "error": statistics.median(errors),
                "errors": errors,
                "pooled_error": of_all / all_real[statistic] - 1,
                "chance": [min(of_draws) / of_all - 1, max(of_draws) / of_all - 1],
                "repeat": measured[-1] / measured[0] - 1,
            }
    return run


def values(all_of: Iterable[float | None]) -> dict[str, float]:
    known = sorted(value for value in all_of if value is not None)
    return {"mean": statistics.fmean(known), "p99": percentile(known, 99) or 0.0}


if __name__ == "__main__":
    main()
