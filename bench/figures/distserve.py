"""DistServe: goodput, placements and queueing, from its public coefficients (OPT on A100-80G).

Lengths of its data sets are drawn from log-normal distributions with the means that it states; the
requests themselves are not public in that form. Settings are those of its simulator, simdistserve:
objectives each by itself, no bound on batches or pools, its scheduling overhead, 300 requests, and
a bisection whose last interval is 0.25 requests/s per GPU.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from bench.figures.claims import Answer, Claim, Panel, Part, by_places, by_size
from engine.protocol import BadRequest
from router.planning import (
    Arrival,
    Division,
    Evaluator,
    Instance,
    Overhead,
    Pair,
    Sample,
    fitting_instances,
    highest_rate,
    low_affinity,
    measured_model,
    node_pairs,
    prefill_ends,
)
from router.telemetry import Slo

__all__ = [
    "DATA",
    "DEVICE",
    "INPUT",
    "MODEL",
    "OUTPUT",
    "SEEDS",
    "Planner",
    "figure_4",
    "placements",
    "sample",
    "sample_fixed",
    "simulator",
]

MODEL, DEVICE = "opt-13b", "a100"
TARGET = 0.9
INPUT, OUTPUT = 512, 64  # likewise
SEEDS = (0, 1, 2)
MOST, PRECISION = 5.0, 0.25  # requests/s per GPU: simdistserve's bisection
RATES_4 = tuple(0.5 * number for number in range(1, 27))  # requests/s


@dataclass(frozen=True, slots=True)
class DataSet:
    """Log-normal lengths (median, sigma) of prompts and answers."""

    prompt: tuple[float, float]
    answer: tuple[float, float]
    most: int = 2048


# Means: 756 in and 200 out; 171 and 98; 1738 and 91.
DATA = {
    "ShareGPT": DataSet((780.0, 0.8), (143.0, 1.0)),
    "HumanEval": DataSet((158.0, 0.4), (76.0, 0.7)),
    "LongBench": DataSet((1650.0, 0.32), (71.0, 0.7)),
}
# Table 1's objectives in ms, and Table 3's placements: (tp, pp) for prefill and for decode.
TABLE_3 = (
    ("opt-13b", "ShareGPT", Slo(250.0, 100.0), (2, 1), (1, 1)),
    ("opt-66b", "ShareGPT", Slo(2500.0, 150.0), (4, 1), (2, 2)),
    ("opt-66b", "LongBench", Slo(15000.0, 150.0), (4, 1), (2, 2)),
    ("opt-66b", "HumanEval", Slo(125.0, 200.0), (4, 1), (2, 2)),
)


def sample(name: str, seed: int, count: int = 300) -> Sample:
    """Return requests of a data set, at one per second on average."""
    data, source, at_s = DATA[name], random.Random(seed), 0.0
    found: list[Arrival] = []
    while len(found) < count:
        prompt = round(source.lognormvariate(0, data.prompt[1]) * data.prompt[0])
        output = round(source.lognormvariate(0, data.answer[1]) * data.answer[0])
        if prompt >= 4 and output >= 4 and prompt + output < data.most:
            at_s += source.expovariate(1)
            # simdistserve counts as output what comes after the first token.
            found.append(Arrival(at_s, prompt, output + 1))
    return Sample(tuple(found))


class Planner:
    """Goodput per GPU of pairs of instances, as simdistserve or with the bounds of real pools."""

    def __init__(self, model: str, requests: Sample, slo: Slo, gpus: int, *, bounded: bool) -> None:
        measured = measured_model(model, DEVICE)
        self.instances: Mapping[Division, Instance] = fitting_instances(
            measured, nodes=1, gpus_per_node=gpus, longest=requests.longest
        )
        if not bounded:
            self.instances = {d: replace(i, pool_tokens=10**9) for d, i in self.instances.items()}
        self.evaluator = Evaluator(
            requests, slo, TARGET, True, max_tokens=10**9, max_batch=10**9,
            overhead=Overhead(2.0, 1e-4), fills=0,
        )  # fmt: skip
        self.pairs = node_pairs(self.instances, nodes=1, gpus_per_node=gpus)

    def per_gpu(self, pair: Pair) -> float:
        """Return the goodput per GPU, to a step of the bisection."""
        prefill, decode = self.instances[pair.whole_prefill], self.instances[pair.whole_decode]

        def passes(rate: float) -> bool:
            shares = self.evaluator.attained([prefill], [decode], rate * pair.gpus)
            return shares.share(separate=True) >= TARGET

        return highest_rate(passes, MOST, PRECISION)

    def best(self) -> tuple[Pair, float]:
        """Return algorithm 2's choice."""
        choice = low_affinity(self.pairs, lambda pair: pair.gpus * self.per_gpu(pair), 1.0)
        assert isinstance(choice.best.candidate, Pair)
        return choice.best.candidate, choice.best.per_gpu


def simulator() -> Part:
    """DistServe's simulator's own answer for OPT-13B on four GPUs."""
    rows: list[dict[str, Any]] = []
    for seed in SEEDS:
        row: dict[str, Any] = {"requests of seed": seed}
        for name, bounded in (("as simdistserve", False), ("real pools", True)):
            planner = Planner(
                MODEL, sample("ShareGPT", seed), Slo(200.0, 100.0), 4, bounded=bounded
            )
            pair, per_gpu = planner.best()
            row |= {name: str(pair).removesuffix(", 1 node(s)"), f"{name}, per GPU": per_gpu}
            row[f"{name}, tp 2 and 1"] = planner.per_gpu(Pair(1, Division(2, 1), Division(1, 1)))
        rows.append(row)

    def answer(name: str) -> tuple[Answer, Answer]:
        same = [row[name] == "prefill tp=2 pp=1, decode tp=1 pp=1" for row in rows]
        rate = fmean(row[f"{name}, tp 2 and 1"] for row in rows)
        chosen = ", ".join(dict.fromkeys(row[name] for row in rows))
        return (
            Answer(f"{sum(same)} of {len(same)}: {chosen}", by_places(same)),
            Answer(f"{rate:.2f}", by_size(1.56, rate)),
        )

    answers = {name: answer(name) for name in ("as simdistserve", "real pools")}
    claims = [
        Claim(
            "simdistserve", "OPT-13B, ShareGPT, 4 GPUs, TTFT 200 ms and TPOT 100 ms: tp 2 for "
            "prefill and 1 for decode", {name: both[0] for name, both in answers.items()},
            "Algorithm 2 over three samples of requests with ShareGPT's mean lengths.",
        ),
        Claim(
            "simdistserve", "… with 1.56 requests/s per GPU",
            {name: both[1] for name, both in answers.items()},
            "Its requests are not public. For ours, simdistserve itself finds 1.88.",
        ),
    ]  # fmt: skip
    return Part({"rows": rows}, claims)


def placements() -> Part:
    """Table 3: the placements that DistServe chose for its experiments."""
    rows: list[dict[str, Any]] = []
    for model, data, slo, prefill, decode in TABLE_3:
        theirs = Pair(1, Division(*prefill), Division(*decode))
        row: dict[str, Any] = {"model": model, "data": data, "paper": _pair(theirs)}
        for name, bounded in (("as simdistserve", False), ("real pools", True)):
            planner = Planner(model, sample(data, 0), slo, 8, bounded=bounded)
            try:
                pair, per_gpu = planner.best()
            except BadRequest:
                row |= {name: "none", f"{name}, per GPU": None, f"{name}, theirs": 0.0}
                continue
            row |= {name: _pair(pair), f"{name}, per GPU": per_gpu}
            row[f"{name}, theirs"] = planner.per_gpu(theirs)
        rows.append(row)
    answers = {}
    for name in ("as simdistserve", "real pools"):
        same = [row[name] == row["paper"] for row in rows]
        prefills = sum(_prefill(row[name]) == _prefill(row["paper"]) for row in rows)
        answers[name] = Answer(
            f"{sum(same)} of {len(same)} (its prefill half {prefills}): "
            + "; ".join(row[name] for row in rows),
            by_places(same),
        )
    nothing = {"as simdistserve": Answer("–", "not simulated")}
    claims = [
        Claim(
            "Table 3", "placements (prefill + decode): " + "; ".join(row["paper"] for row in rows),
            answers, "Algorithm 2 on a node of eight GPUs, with Table 1's objectives. Lengths have "
            "the paper's means; their spreads are not published. Pools without bounds let "
            "decode do with fewer GPUs; with bounds it needs more than in the paper.",
        ),
        Claim(
            "Table 3", "OPT-175B: tp 3 pp 3 + tp 4 pp 3", nothing,
            "Its coefficients are not public.",
        ),
        Claim(
            "Figures 8, 9", "the other models and data sets, and DeepSpeed-MII", nothing,
            "The baselines' versions have no public times.",
        ),
    ]  # fmt: skip
    return Part({"rows": rows}, claims)


def sample_fixed(requests: int) -> Sample:
    """Return requests of Figure 1, at one per second on average."""
    source, at_s, found = random.Random(1), 0.0, []
    for _ in range(requests):
        at_s += source.expovariate(1)
        found.append(Arrival(at_s, INPUT, OUTPUT))
    return Sample(tuple(found))


def figure_4(requests: int = 20_000) -> Part:
    """Two GPUs for prefills: by tensor parallelism, or by pipeline stages."""
    measured = measured_model(MODEL, DEVICE)
    instances = fitting_instances(measured, nodes=1, gpus_per_node=2)
    whole = sample_fixed(requests)
    lines: dict[str, list[tuple[float, float]]] = {}
    for name, division in (("tp 2", Division(2, 1)), ("pp 2", Division(1, 2))):
        lines[name] = []
        for rate in RATES_4:
            arrivals = whole.at_rate(rate)
            ends = prefill_ends(arrivals, instances[division], max_tokens=INPUT)
            mean = fmean(e - a.at_s for e, a in zip(ends, arrivals, strict=True))
            lines[name].append((rate, 1e3 * mean))
    better = {
        rate: tp < pp for (rate, tp), (_, pp) in zip(lines["tp 2"], lines["pp 2"], strict=True)
    }
    crossing = next(rate for rate, is_better in better.items() if not is_better)
    low = [is_better for rate, is_better in better.items() if rate < crossing]
    high = [not is_better for rate, is_better in better.items() if rate >= crossing]
    claims = [
        Claim(
            "Figure 4", "mean TTFT: tensor parallelism is better at low rates, pipeline stages at "
            "high ones", {"ours": Answer(f"crossing at {crossing:g}/s", by_places([*low, *high]))},
            "OPT-13B with 512 tokens on two GPUs, a prompt at a time (M/D/1). The paper has "
            "OPT-66B; its coefficients begin with two GPUs.",
        )
    ]  # fmt: skip
    shown = {name: [(r, ms) for r, ms in line if ms < 1000] for name, line in lines.items()}
    panel = Panel("OPT-13B, 512 tokens, 2 GPUs", "requests/s", "mean TTFT (ms)", shown)
    return Part({"mean_ttft_ms": lines}, claims, {"distserve-figure-4": [panel]})


def _prefill(pair: str) -> str:
    return pair.partition(" + ")[0]


def _pair(pair: Pair) -> str:
    prefill, decode = pair.whole_prefill, pair.whole_decode
    return f"tp {prefill.tp} pp {prefill.pp} + tp {decode.tp} pp {decode.pp}"
