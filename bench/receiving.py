"""What puts do to the decodes of the engine that receives them (microserving paper, §3.6).

Purpose: the paper says that a transfer "does not affect the ongoing requests of the receiver
engine", because one-sided puts need no work there. Here puts are copies into shared memory by the
sender's process. So the receiver's own work is only what its calls cost, and what the copies take
of the memory's bandwidth.

How: SmolLM2 in bfloat16 on two engines with a core each. `DECODES` generations decode on one of
them; the gaps between their events are taken as a client sees them, in each of four phases:

- `alone`: nothing else;
- `calls`: `prep_recv` of `LONG` tokens and `release`, one after the other, without a put;
- `puts`: the same with a `remote_send` of tokens that the sender has cached, so that it puts all
  the time;
- `receives`: the same with tokens that the sender has to compute.

`tpot_p50`, `tpot_p99`: a phase's percentile over that of `alone` in the same round. `put_mb_per_s`
is what arrived meanwhile.

Run: `make bench-receiving`, or `python -m bench.receiving [--save] [--rounds 4]`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from typing import Any

from bench.deployment import deployed
from bench.interference_engines import DECODES, LONG, Engines, Figures
from bench.report import publish, spread, table

FLAGS = ("smollm2", "--engines", "2", "--dtype", "bfloat16", "--pool-pages", "2048",
         "--threads", "1")  # fmt: skip
PHASES = ("alone", "calls", "puts", "receives")
TOKEN_BYTES = 30 * 2 * 3 * 64 * 2  # of SmolLM2's KV in bfloat16


async def measure(engines: list[str], key: str, rounds: int) -> dict[str, list[Figures]]:
    """Return the figures of each round, by phase."""
    found: dict[str, list[Figures]] = {name: [] for name in PHASES}
    async with Engines(*engines, key) as bench:
        await bench.prepare()
        await bench.receive("puts")
        for _ in range(rounds):
            for name in PHASES:
                figures, took = await bench.phase(name)
                puts = len(took) if name in ("puts", "receives") else 0
                figures["put_mb_per_s"] = puts * LONG * TOKEN_BYTES / 1e6 / figures["seconds"]
                figures["calls_per_s"] = len(took) / figures["seconds"]
                found[name].append(figures)
    return found


def main() -> None:
    """Measure, print the table, publish the JSON."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--rounds", type=int, default=4)
    options.add_argument("--save", action="store_true")
    rounds = options.parse_args().rounds
    with deployed(*FLAGS) as deployment:
        found = asyncio.run(measure(deployment.engines, deployment.engine_key, rounds))
    phases: dict[str, dict[str, Any]] = {}
    for name, figures in found.items():
        phases[name] = {key: spread([one[key] for one in figures]) for key in figures[0]}
        for percentile in ("p50", "p99"):
            key = f"tpot_{percentile}_ms"
            pairs = zip(figures, found["alone"], strict=True)
            phases[name][f"tpot_{percentile}"] = spread(
                [one[key] / base[key] for one, base in pairs]
            )
    names = ("tpot_p50_ms", "tpot_p99_ms", "tpot_p50", "tpot_p99", "put_mb_per_s", "calls_per_s")
    rows = [
        [phase, *(f"{figures[name]['median']:.4g}" for name in names)]
        for phase, figures in phases.items()
    ]
    table(f"{DECODES} decodes on the receiver, medians of {rounds} rounds", ["", *names], rows)
    publish("receiving", {
        "phases": phases, "decodes": DECODES, "rounds": rounds, "flags": FLAGS,
        "load_average": os.getloadavg(),
    })  # fmt: skip


if __name__ == "__main__":
    main()
