"""How prefills slow down decodes on the same engine, and long prompts delay short ones.

Purpose: disaggregation promises streams that do not stutter when other prompts arrive. An engine
can avoid most of that by itself: it computes a prompt in chunks that hardly lengthen the steps of
the decodes (`--decode-slowdown`), and lets short prompts overtake long ones.

Theory: a step of 16 decodes lasts D; with n tokens of prompts it lasts D + n·c, where c grows with
what is before them. An engine that keeps (D + n·c) / D at s computes prompts at about 1 - 1/s of
its speed meanwhile. A prompt of r tokens that comes behind a long one is done with the step under
way and ceil(r / h) more, h being half of the tokens of prompts in a step: without decodes half of
the budget, with them half of the `MIN_TOKENS` that are always taken, or more.

How: SmolLM2 in bfloat16, one engine with a thread per core. `DECODES` generations decode after 32
tokens; the gaps between their events are taken as a client sees them, over the first `TOKENS`
tokens or `SECONDS`, in each of four phases:

- `alone`: nothing else;
- `prefills`: prompts of `LONG` random tokens, one after the other;
- `sends`: `remote_send`s of as many to a second engine, one after the other, which only receives;
- `both` at once.

`tpot_p99`: a phase's 99th percentile over that of `alone` in the same round (goal: 2).
`prompt_tokens_per_s` is what was computed of prompts meanwhile, by prefills and sends together.

Then the times to first token: of `LONG` tokens with nothing beside them, of `SHORT` ones alone and
behind long ones, without and with decodes. The bounds of these: 2 of the longest steps that a
budget makes, which is measured too, and with decodes as many steps as said above, each of the p99
of `prefills`. All of it again with `--decode-slowdown 0`, in one round.

Run: `make bench-interference`, or `python -m bench.interference [--save] [--rounds 2]`.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import time
from typing import Any

from bench.deployment import deployed
from bench.interference_engines import DECODES, LONG, SHORT, Engines, Figures
from bench.report import publish, spread, table
from engine.scheduling.chunk_budget import MIN_TOKENS

FLAGS = ("smollm2", "--engines", "2", "--dtype", "bfloat16", "--pool-pages", "2048",
         "--threads", str(len(os.sched_getaffinity(0))))  # fmt: skip
PHASES = ("alone", "prefills", "sends", "both")
TIMES = 4  # repetitions of a short prompt behind a long one
GOAL = 2.0


async def measure(engines: list[str], key: str, rounds: int) -> dict[str, Any]:
    """Measure all phases `rounds` times, then the times to first token."""
    phases: dict[str, list[Figures]] = {name: [] for name in PHASES}
    long_s: dict[str, list[float]] = {name: [] for name in PHASES[1:]}
    firsts: dict[str, list[float]] = {
        "long": [], "alone": [], "behind": [], "behind_beside_decodes": []
    }  # fmt: skip
    async with Engines(*engines, key) as bench:
        await bench.prepare()
        for _ in range(rounds):
            for name in PHASES:
                figures, took = await bench.phase(name)
                phases[name].append(figures)
                long_s.get(name, []).extend(took)
        for _ in range(TIMES):
            firsts["long"].append(await bench.first_token(bench.random(LONG)))
            firsts["alone"].append(await bench.first_token(bench.random(SHORT)))
            firsts["behind"].append(await bench.behind(decodes=False))
            firsts["behind_beside_decodes"].append(await bench.behind(decodes=True))
        step = [await bench.longest_step() for _ in range(3)]
    return {
        "phases": {
            name: {key: spread([one[key] for one in found]) for key in found[0]}
            for name, found in phases.items()
        },
        "tpot_p50": _over_alone(phases, "tpot_p50_ms"),
        "tpot_p99": _over_alone(phases, "tpot_p99_ms"),
        "long_s": {name: spread(took) for name, took in long_s.items() if took},
        "ttft_ms": {name: spread(found) for name, found in firsts.items()},
        "longest_step_ms": spread(step),
    }


def _over_alone(phases: dict[str, list[Figures]], key: str) -> dict[str, dict[str, float]]:
    """Divide a figure of each phase by that of `alone` in the same round."""
    return {
        name: spread([a[key] / b[key] for a, b in zip(found, phases["alone"], strict=True)])
        for name, found in phases.items()
        if name != "alone"
    }


def bounds(result: dict[str, Any], *, paced: bool) -> Figures:
    """Return the upper bounds for a short prompt's time to first token (ms)."""
    step = result["phases"]["prefills"]["tpot_p99_ms"]["median"]
    steps = 1 + (math.ceil(SHORT / (MIN_TOKENS // 2)) if paced else 1)
    return {
        "behind": round(2 * result["longest_step_ms"]["median"], 1),
        "behind_beside_decodes": round(steps * step, 1),
    }


def main() -> None:
    """Measure, print the tables, publish the JSON."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--rounds", type=int, default=2)
    options.add_argument("--save", action="store_true")
    rounds, began = options.parse_args().rounds, time.monotonic()
    results: dict[str, Any] = {}
    for name, flags, count in (("paced", (), rounds), ("unpaced", ("--decode-slowdown", "0"), 1)):
        with deployed(*FLAGS, *flags) as deployment:
            result = asyncio.run(measure(deployment.engines, deployment.engine_key, count))
        results[name] = result | {"ttft_bound_ms": bounds(result, paced=not flags)}
        show(name, results[name])
    paced = results["paced"]
    publish(
        "interference",
        {
            "tpot_p99_goal": GOAL,
            **{f"tpot_p99_{name}": paced["tpot_p99"][name]["median"] for name in PHASES[1:]},
            **{
                f"ttft_{name}_over_bound": round(paced["ttft_ms"][name]["max"] / bound, 3)
                for name, bound in paced["ttft_bound_ms"].items()
            },
            **results,
            "decodes": DECODES,
            "rounds": rounds,
            "flags": FLAGS,
            "load_average": os.getloadavg(),
            "minutes": round((time.monotonic() - began) / 60, 1),
        },
    )


def show(name: str, result: dict[str, Any]) -> None:
    """Print the tables of one setting."""
    rows = []
    for phase, figures in result["phases"].items():
        ratios = [
            result[key].get(phase, {"median": 1})["median"] for key in ("tpot_p50", "tpot_p99")
        ]
        cells = [f"{figures[key]['median']:.1f}" for key in figures]
        rows.append([phase, *cells, *(f"{ratio:.2f}" for ratio in ratios)])
    columns = ["", "p50 ms", "p99 ms", "max ms", "prompt tokens/s", "p50 ratio", "p99 ratio"]
    table(f"{DECODES} decodes, {name}", columns, rows)
    rows = [
        [where, f"{found['median']:.0f}", f"{found['max']:.0f}", f"{bound:.0f}" if bound else ""]
        for where, found in result["ttft_ms"].items()
        for bound in [result["ttft_bound_ms"].get(where)]
    ]
    table(f"first of {SHORT} tokens, ms, {name}", ["", "median", "max", "bound"], rows)


if __name__ == "__main__":
    main()
