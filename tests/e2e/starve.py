"""A starved host: many busy processes beside a deployment, and processes that stop for seconds.

`make starve` starts `up`, streams through it, and keeps more processes busy than there are cores.
`up`, the router and the engines are stopped (SIGSTOP) in turn: `up` for longer than its deadline
for a silent router, the router for less than that, the engines for longer than the router's
deadline for a silent engine. No request may fail, no answer may differ from an idle engine's, no
process may be killed, no strategy may be charged, and nothing may be left over. `up` and the router
must say that they did not run. Prints one JSON document.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from e2e_deployment import Deployment, launch
from soak import Soak, leftovers

MODEL = "tiny"
CLIENTS = 4
DEADLINE_S = 4.0  # of `up`, for a silent router
STOPS = (("up", DEADLINE_S + 1.0), ("router", 1.5), ("engine-1", 2.5))
REST_S = 1.5  # between two stops: an engine that was stopped is found and used again
FLAGS = ("--engines", "2", "--pool-pages", "512", "--health-deadline-s", str(DEADLINE_S))
# Ends with its parent, also if that is killed.
BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    sum(range(100_000))\n"


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Keep this many processes computing while the body runs."""
    running = [subprocess.Popen([sys.executable, "-S", "-c", BUSY]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
        for process in running:
            process.wait()


async def stop_in_turn(pids: dict[str, int], rounds: int) -> None:
    """Stop each process `rounds` times."""
    for _ in range(rounds):
        for name, seconds in STOPS:
            os.kill(pids[name], signal.SIGSTOP)
            try:
                await asyncio.sleep(seconds)
            finally:
                os.kill(pids[name], signal.SIGCONT)
            await asyncio.sleep(REST_S)


async def load(deployment: Deployment, rounds: int, processes: int) -> Soak:
    """Stream through the deployment until every process has been stopped."""
    pids = {"up": deployment.up.pid, "router": deployment.pid}
    pids |= {engine.id: engine.pid for engine in deployment.engines}
    limits = httpx.Limits(max_connections=64)
    async with httpx.AsyncClient(
        base_url=deployment.url, timeout=120, limits=limits, verify=False
    ) as http:
        soak = Soak(deployment, MODEL, http)
        await asyncio.to_thread(soak.learn)
        over = time.monotonic() + rounds * sum(seconds + REST_S for _, seconds in STOPS)
        with busy(processes):
            async with asyncio.TaskGroup() as tasks:
                for _ in range(CLIENTS):
                    tasks.create_task(soak.client(over))
                await stop_in_turn(pids, rounds)
    return soak


def counted(metrics: str, name: str) -> float:
    """Return the sum of a metric over its labels."""
    values = re.findall(rf"^microserve_router_{name}(?:\{{.*\}})? (\S+)$", metrics, re.M)
    return sum(map(float, values))


def run(folder: Path, rounds: int, processes: int) -> dict[str, Any]:
    """Starve a deployment, and return what was found; `failures` must be empty."""
    deployment = launch(folder, MODEL, *FLAGS)
    try:
        state = (folder / "state.json").read_text()
        soak = asyncio.run(load(deployment, rounds, processes))
        left = leftovers(deployment)
        metrics = httpx.get(f"{deployment.url}/metrics", timeout=30).text
        failures = [
            f"{count} × {outcome}"
            for outcome, count in soak.outcomes.items()
            if outcome not in ("whole", "vanished")
        ]
        if left:
            failures.append(f"left over: {left}")
        if (folder / "state.json").read_text() != state:
            failures.append("a process was restarted")
        if counted(metrics, "strategy_offences_total"):
            failures.append("a strategy was charged")
        if not counted(metrics, "host_stalls_total"):
            failures.append("the router does not count that it was stopped")
        log = (folder / "up.log").read_text()
        for said in ("up did not run for", "this process did not run for"):
            if said not in log:
                failures.append(f"nobody logs {said!r}")
        for wrong in ("is killed", "has ended", "Traceback"):
            if wrong in log:
                failures.append(f"the log has {wrong!r}")
        if not soak.outcomes["whole"]:
            failures.append("no request was answered")
        return {
            "rounds": rounds, "busy": processes, "outcomes": dict(soak.outcomes),
            "stalls": counted(metrics, "host_stalls_total"),
            "stalled_s": counted(metrics, "host_stalled_seconds_total"),
            "retries": counted(metrics, "retries_total"), "failures": failures,
        }  # fmt: skip
    finally:
        deployment.up.terminate()
        deployment.up.wait(60)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--busy", type=int, default=30, help="number of busy processes")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        document = run(Path(folder), flags.rounds, flags.busy)
    print(json.dumps(document))
    return 1 if document["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
