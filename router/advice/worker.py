"""What the confined processes of an advice do: fit the engines' speed, and run one candidate."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import orjson

from engine.protocol import MOST_MESSAGE, MicroserveError
from router.advice.fleet import fit_fleet, virtual_fleet
from router.base import import_from
from router.rollout import Catalog
from router.simulation import CONFIG, Experiment, run_experiment, summarize
from router.telemetry import Slo
from router.workload import WorkloadConfig

__all__ = ["fit", "run", "shaken"]

NEIGHBOURS = 16  # on each side of an arrival, from which its distance to the one before is drawn
ERROR_CHARACTERS = 500


def fit(job: dict[str, Any]) -> dict[str, Any]:
    """Return the virtual fleet for the engines of a job, as of `fit_fleet`, or `error`."""
    try:
        return fit_fleet(job["engines"], job["profile"])
    except MicroserveError as error:
        return {"error": error.message[:MOST_MESSAGE]}


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Run a candidate once for each seed; return the figures of the `runs`, or `error`.

    The job has the strategy's `source` (empty: it is installed), `file`, `folders`, `name` and
    `params`; the `fleet` and the `roles` under it; the descriptor of the `trace`, `seeds`, `config`
    and `slo`.
    """
    for folder in job["folders"]:
        import_from(Path(folder))
    slo = Slo(**job["slo"])
    try:
        catalog = Catalog()
        source, name = job["source"], job["name"]
        found = catalog.load(source, name=name, file=job["file"]) if source else catalog[name]
        fleet = virtual_fleet(job["fleet"], job["roles"])
        arrivals = _arrivals(job["trace"])
        runs = []
        for seed in range(job["seeds"]):
            with _trace(job["trace"], shaken(arrivals, seed)) as trace:
                experiment = Experiment(
                    found.bind(job["params"]),
                    fleet,
                    WorkloadConfig(name=trace, seed=seed),
                    config=replace(CONFIG, **job["config"]),
                )
                runs.append(_figures(summarize(run_experiment(experiment), slo)))
        return {"runs": runs}
    except MicroserveError as error:
        return {"error": error.message[:MOST_MESSAGE]}


def shaken(arrivals: Sequence[float], seed: int) -> list[float]:
    """Return the arrival times of a seed: 0 leaves them as they were recorded.

    Other seeds redraw each distance between two arrivals from the `2 * NEIGHBOURS + 1` recorded
    ones around it. So requests keep their order and the rate its course, and bursts fall elsewhere.
    """
    if not seed:
        return list(arrivals)
    source = random.Random(seed)
    gaps = [after - before for before, after in pairwise(arrivals)]
    at, times = 0.0, [0.0][: len(arrivals)]
    for number in range(len(gaps)):
        at += source.choice(gaps[max(0, number - NEIGHBOURS) : number + NEIGHBOURS + 1])
        times.append(at)
    return times


def _arrivals(trace: int) -> list[float]:
    with Path(f"/proc/self/fd/{trace}").open("rb") as lines:
        return [orjson.loads(line)["at_s"] for line in lines]


@contextmanager
def _trace(trace: int, arrivals: Sequence[float]) -> Iterator[str]:
    """The path of the trace with other arrival times, in memory that ends with this process."""
    copy = os.memfd_create("trace")
    try:
        path = Path(f"/proc/self/fd/{copy}")
        with Path(f"/proc/self/fd/{trace}").open("rb") as lines, path.open("wb") as file:
            for line, at in zip(lines, arrivals, strict=True):
                fields = {**orjson.loads(line), "at_s": at}
                file.write(orjson.dumps(fields, option=orjson.OPT_APPEND_NEWLINE))
        yield str(path)
    finally:
        os.close(copy)


def _figures(figures: dict[str, Any]) -> dict[str, Any]:
    return {
        "requests": figures["requests"],
        "completed": figures["completed"],
        "jct_ms": figures["jct_ms"]["mean"],
        "ttft_ms": figures["ttft_ms"]["mean"],
        "ttft_p99_ms": figures["ttft_ms"]["p99"],
        "tpot_ms": figures["tpot_ms"]["mean"],
        "attained": figures["attained"],
        "error": next(iter(figures["error_messages"]), "")[:ERROR_CHARACTERS],
        "utilisation": fmean(engine["utilisation"] for engine in figures["engines"]),
    }
