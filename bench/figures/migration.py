"""Microserving, Figure 12 and Table 3: moving a cached context instead of computing it.

The profile of the virtual engines is fitted to Table 3 and to the factor 1.7 of Figure 12
(`bench/profiles.py`). So these claims test scheduler, matching and overlapped puts around the
fitted times, and not the times themselves; each says so.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from bench.figures.claims import Answer, Claim, Panel, Part, by_effect, by_places
from bench.figures.runs import OURS, PAPER, PROFILE, Arm
from engine.latency import StepWork, find_profile
from router import Chunk, Cluster, Request, strategy
from router.simulation import Experiment, read_fleet, run_experiment
from router.telemetry import Leg
from router.workload import WorkloadConfig
from strategies.prefill_decode import prefill_decode

__all__ = ["figure_12", "table_3"]

NEW = 500  # tokens of the unique text
INPUTS = (1000, 3000, 5000)
TABLE_3 = {1000: (1.247, 0.197, 15.8), 3000: (1.391, 0.533, 38.3), 5000: (1.564, 0.867, 55.4)}
FITTED = "The profile is fitted to this."
FIRST, OTHER = 10, 100  # token ids
PAGE = 16  # tokens: what a cache holds is a multiple


@strategy
async def context_on_one(request: Request, cluster: Cluster) -> AsyncGenerator[Chunk, None]:
    """The first request fills the prefill engine's cache; the others are disaggregated."""
    if request.sampling.max_tokens == 1:
        engine = cluster.prefill.least_loaded()
        async for chunk in engine.start_generate(request, begin=0):
            yield chunk
        return
    async for chunk in prefill_decode(request, cluster):
        yield chunk


def prefill(tokens: int, context: int, arm: Arm) -> tuple[Leg, float]:
    """Return `remote_send`, and the TTFT in ms, of a prompt that begins with a cached context."""
    prompt = [FIRST + number % 7 for number in range(context)]
    prompt += [OTHER + number % 11 for number in range(tokens - context)]
    bodies = [{"prompt": prompt, "max_tokens": 8}]
    if context:
        bodies.insert(0, {"prompt": prompt[:context], "max_tokens": 1})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "requests.jsonl"
        path.write_text("".join(json.dumps(body) + "\n" for body in bodies))
        config = WorkloadConfig(str(path), rate=0.1, arrivals="fixed")
        fleet = read_fleet(f"2x{PROFILE}", prefill=1, decode=1, flags=arm.flags)
        experiment = Experiment(context_on_one.bind({}), fleet, config, len(bodies))
        record = run_experiment(experiment, keep_legs=True).records[-1]
    (send,) = [leg for leg in record.legs if leg.call == "remote_send"]
    assert send.cached_tokens > context - PAGE and record.first_token_s is not None, record
    return send, 1e3 * record.first_token_s


def figure_12() -> Part:
    """Prefill time with the context migrated, and with all of it computed again."""
    times: dict[str, dict[int, dict[str, Any]]] = {}
    for arm in (PAPER, OURS):
        times[arm.name] = {}
        for tokens in INPUTS:
            migrated, migrated_ttft = prefill(tokens, tokens - NEW, arm)
            computed, computed_ttft = prefill(tokens, 0, arm)
            times[arm.name][tokens] = {
                "migrated_ms": migrated.ms, "recomputed_ms": computed.ms,
                "migrated_ttft_ms": migrated_ttft, "recomputed_ttft_ms": computed_ttft,
            }  # fmt: skip

    def each(answer: Any) -> dict[str, Answer]:
        return {arm: answer(by_tokens) for arm, by_tokens in times.items()}

    def speedup(by_tokens: dict[int, dict[str, float]]) -> Answer:
        found = {n: one["recomputed_ms"] / one["migrated_ms"] for n, one in by_tokens.items()}
        text = f"{found[1000]:.2f}× ({found[3000]:.1f}×, {found[5000]:.1f}× at 3000, 5000)"
        return Answer(text, by_effect(0.7, found[1000] - 1))

    def slight(by_tokens: dict[int, dict[str, float]]) -> Answer:
        first, *_, last = (one["migrated_ms"] for one in by_tokens.values())
        return Answer(f"{first:.0f} → {last:.0f} ms", by_places([last < 1.35 * first]))

    def linear(by_tokens: dict[int, dict[str, float]]) -> Answer:
        values = [one["recomputed_ms"] for one in by_tokens.values()]
        return Answer(
            " → ".join(f"{value:.0f}" for value in values) + " ms",
            by_places(
                [values[2] > 4 * values[0], values[2] - values[1] > 0.8 * (values[1] - values[0])]
            ),
        )

    claims = [
        Claim("Figure 12", "1000 tokens, 500 of them cached on the sender: prefill 1.7× faster",
              each(speedup), f"{FITTED} Time of `remote_send`, puts included."),
        Claim("Figure 12", "“only a slight increase” with the context, from 1000 to 5000 tokens",
              each(slight), f"{FITTED} Table 3's time per layer grows by 25 %. Counted as slight: "
              "below 35 %."),
        Claim("Figure 12", "without migration it grows linearly", each(linear),
              "1000, 3000 and 5000 tokens; only the first is fitted. In chunks of 512 each chunk "
              "adds the fixed time of a step."),
    ]  # fmt: skip
    panels = [
        Panel(arm, "input tokens", "prefill (ms)", {
            kind: [(float(n), one[f"{kind}_ms"]) for n, one in by_tokens.items()]
            for kind in ("migrated", "recomputed")
        })
        for arm, by_tokens in times.items()
    ]  # fmt: skip
    return Part({"times": times}, claims, {"figure-12": panels})


def table_3() -> Part:
    """Time per layer of computing and of putting."""
    profile = find_profile(PROFILE)
    rows: dict[int, dict[str, Any]] = {}
    places = []
    for tokens, (compute, transfer, share) in TABLE_3.items():
        squares = tokens**2 - (tokens - NEW) ** 2
        step_ms = 1e3 * profile.step.seconds(StepWork(NEW, squares))
        layer_bytes = tokens * profile.kv_bytes_per_token / profile.layers
        put_ms = 1e3 * (layer_bytes / profile.put.bandwidth + profile.put.layer_s)
        layer_ms = step_ms / profile.layers
        send, _ = prefill(tokens, tokens - NEW, PAPER)
        assert send.ms is not None
        begin = send.cached_tokens
        work = StepWork(send.computed_tokens, (tokens - 1) ** 2 - begin**2)
        hidden = send.ms - 1e3 * profile.step.seconds(work)
        rows[tokens] = {
            "paper": {"compute_ms": compute, "put_ms": transfer, "share_percent": share},
            "compute_ms": layer_ms, "put_ms": put_ms, "share_percent": 100 * put_ms / layer_ms,
            "all_puts_ms": profile.layers * put_ms, "beyond_computing_ms": hidden,
        }  # fmt: skip
        places.append(abs(100 * put_ms / layer_ms - share) < 1.0)
    shares = " / ".join(f"{row['share_percent']:.1f}" for row in rows.values())
    left = " / ".join(f"{row['beyond_computing_ms']:.1f}" for row in rows.values())
    whole = " / ".join(f"{row['all_puts_ms']:.1f}" for row in rows.values())
    covered = [row["beyond_computing_ms"] < 0.35 * row["all_puts_ms"] for row in rows.values()]
    claims = [
        Claim("Table 3", "putting takes 15.8 / 38.3 / 55.4 % of computing, per layer",
              {"both": Answer(f"{shares} %", by_places(places))},
              f"{FITTED} Two coefficients for three transfers, three for four computations."),
        Claim("Table 3", "transfers are fully hidden as long as they are shorter than computing",
              {"both": Answer(f"{left} ms left of {whole} ms of puts", by_places(covered))},
              "`remote_send` beyond its step of computing, call and last layer's put included. The "
              "virtual engine puts each layer when it has been computed."),
    ]  # fmt: skip
    return Part({"layers": rows, "bandwidth_gb_s": profile.put.bandwidth / 1e9}, claims)
