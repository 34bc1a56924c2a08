"""Simulating 100,000 requests over 64 engines.

Purpose: a simulation is of use while somebody waits for it. This bench measures how long one of a
large fleet takes, and its memory. The limits are two minutes on one core, and 2 GB.

How: `microserve simulate` as a user runs it, in a process of its own on one core, with `REQUESTS`
requests of `OUTPUT` output tokens each, for each of `SETTINGS`. A longer prompt takes more steps,
because a step takes few prompt tokens beside its decodes. A higher rate makes larger batches.

Run: `make bench-simulation`, or `python -m bench.simulation [--save]`. It takes about ten minutes.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from typing import Any, NamedTuple

from bench.report import only_save, publish, table

REQUESTS, OUTPUT, FLEET = 100_000, 100, "64xllama-3.1-8b@a100"
LIMIT_S, LIMIT_MB = 120, 2000


class Setting(NamedTuple):
    """What is simulated beside the fleet."""

    strategy: str
    input: int  # tokens of a prompt
    rate: float  # requests per second, over all engines
    roles: tuple[str, ...] = ()


SETTINGS = (
    Setting("data_parallel", 64, 300),
    Setting("data_parallel", 256, 300),
    Setting("prefill_decode", 64, 300, ("--prefill", "16", "--decode", "48")),
)


def main() -> None:
    """Measure, print the table, publish the JSON."""
    only_save(__doc__)
    figures = [measure(setting) for setting in SETTINGS]
    rows = [
        [
            f"{each['strategy']}, {each['input']} tokens in, {each['rate']:g}/s",
            f"{each['seconds']:.0f}",
            f"{each['ms_per_request']:.2f}",
            str(each["peak_mb"]),
            f"{each['virtual_s']:.0f}",
        ]
        for each in figures
    ]
    heads = ["simulated", "s", "ms per request", "peak MB", "virtual s"]
    table(f"{REQUESTS} requests of {OUTPUT} output tokens over {FLEET}", heads, rows)
    publish(
        "simulation",
        {"runs": figures, "requests": REQUESTS, "limit_s": LIMIT_S, "limit_mb": LIMIT_MB},
    )


def measure(setting: Setting) -> dict[str, Any]:
    """Run one simulation; return its time and memory. `peak_mb` is the largest so far."""
    command = [
        *(sys.executable, "-m", "router", "simulate", setting.strategy, "--fleet", FLEET),
        *("--input", str(setting.input), "--output", str(OUTPUT), "--rate", str(setting.rate)),
        *("--requests", str(REQUESTS), *setting.roles),
    ]
    core = max(os.sched_getaffinity(0))
    began = time.perf_counter()
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        check=True,
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    )
    seconds = time.perf_counter() - began
    outcome = json.loads(done.stdout.splitlines()[-1])["runs"][0]
    return {
        **setting._asdict(),
        "seconds": round(seconds, 1),
        "ms_per_request": round(1e3 * seconds / REQUESTS, 3),
        "peak_mb": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024,
        "virtual_s": round(outcome["seconds"], 1),
        "completed": outcome["completed"],
    }


if __name__ == "__main__":
    main()
