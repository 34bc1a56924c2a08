"""Load for a long time, to find leaks, even slow ones.

`make soak` starts a real deployment and sends it requests of all sizes, some of whose clients
disconnect, while the strategies change. Beside them, unless `--calm`:

- clients that do not read their answers;
- an engine that lies, another lie every few seconds;
- uploads of strategies, good and bad;
- faults of the last engine: SIGSTOP for some seconds, SIGKILL.

At the end no request, load, lease or page may remain, and neither memory nor descriptors may have
grown. Every complete answer must have exactly the tokens of an idle engine. Prints a table and, as
the last line, one JSON document.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from e2e_deployment import Deployment, launch
from e2e_liars import SILENT, liar
from rich.console import Console
from rich.table import Table

CLIENTS = 8
WARM_UP = 2200  # requests: more than the router keeps receipts of
SWAP_S = 1.0
SAMPLE_S = 2.0
WINDOW = 15  # samples: three lies long
# Growth that certainly exceeds this is a leak. During a short run the bounded histories of
# generations, swaps and receipts still fill.
SLOPE_MIB_MIN, SLOPE_SHORT, SHORT_MIN = 1.0, 3.0, 10.0
LIE_S, UPLOAD_S, FAULT_S = 10.0, 15.0, 30.0
GOOD_UPLOAD = """
from router import strategy

@strategy
async def soaked(request, cluster):
    async for chunk in cluster.engines.least_loaded().start_generate(request):
        yield chunk
"""
BAD_UPLOADS = (
    "1/0\n",
    "import os\nos._exit(0)\n",
    "while True: pass\n",
    "print('y' * (1 << 26))\n",
)
STRATEGIES: list[dict[str, Any]] = [
    {"name": "data_parallel"},
    {"name": "prefill_decode"},
    {"name": "balanced", "params": {"ratio": 0.3}},
    {"name": "balanced", "params": {"ratio": "auto"}},
    {"name": "cache_aware"},
    {"name": "migrate", "params": {"overload": 256}},
    {"name": "replicate"},
]


@dataclass
class Sizes:
    """The private memory (MiB) and the descriptors of one process over time (s)."""

    process: psutil.Process
    at: list[float] = field(default_factory=list)
    mib: list[float] = field(default_factory=list)
    fds: list[int] = field(default_factory=list)

    def sample(self) -> None:
        memory = self.process.memory_info()
        self.at.append(time.monotonic())
        self.mib.append((memory.rss - memory.shared) / 2**20)
        self.fds.append(self.process.num_fds())

    def slope(self) -> tuple[float, float]:
        """Return the growth in the last half of the run (MiB/min) and its standard error.

        A lie may take memory for as long as it is told, so the least of each window counts.
        """
        skip = len(self.at) // 2
        size = max(1, min(WINDOW, (len(self.at) - skip) // 6))
        windows = range(skip, len(self.at) - size + 1, size)
        at = [(self.at[begin] - self.at[0]) / 60 for begin in windows]
        mib = [min(self.mib[begin : begin + size]) for begin in windows]
        line = statistics.linear_regression(at, mib)
        rest = [y - line.slope * x - line.intercept for x, y in zip(at, mib, strict=True)]
        spread = statistics.variance(at) * (len(at) - 1)
        error = (sum(r * r for r in rest) / max(1, len(at) - 2) / spread) ** 0.5
        return line.slope, error


class Soak:
    """The clients of one deployment of `model`."""

    def __init__(self, deployment: Deployment, model: str, http: httpx.AsyncClient) -> None:
        self._deployment = deployment
        self._model = model
        self._http = http
        self._numbers = itertools.count()
        self.outcomes: Counter[str] = Counter()
        self.swaps = self.lies = self.uploads = self.faulted = 0
        source = random.Random(0)
        self._prompts = [
            [source.randrange(10, 290) for _ in range(source.choice((5, 40, 200, 700)))]
            for _ in range(24)
        ]
        self._wanted: list[list[int]] = []

    def learn(self) -> None:
        """Record the answers of the idle deployment."""
        for prompt in self._prompts:
            answer = self._deployment.complete(prompt, greedy=40, model=self._model)
            self._wanted.append(answer["choices"][0]["token_ids"])

    async def warm_up(self) -> None:
        """Send requests until the router keeps its maximum of receipts, each with three legs."""
        strategy, admin = {"name": "prefill_decode"}, self._deployment.admin
        reply = await self._http.put("/admin/strategy", json=strategy, headers=admin)
        reply.raise_for_status()

        async def one(_: int) -> None:
            body = {"model": self._model, "prompt": [11, 12, 13], "max_tokens": 1}
            (await self._http.post("/v1/completions", json=body)).raise_for_status()

        for _ in range(WARM_UP // 32):
            await asyncio.gather(*map(one, range(32)))

    async def client(self, until: float) -> None:
        while time.monotonic() < until:
            self.outcomes[await self._one(random.Random(next(self._numbers)))] += 1

    async def swapper(self, until: float) -> None:
        for strategy in itertools.cycle(STRATEGIES):
            if time.monotonic() >= until:
                return
            reply = await self._http.put(
                "/admin/strategy", json=strategy, headers=self._deployment.admin
            )
            reply.raise_for_status()
            self.swaps += 1
            await asyncio.sleep(SWAP_S)

    async def slow_reader(self, until: float) -> None:
        """Ask for long answers, read nothing for seconds, and leave."""
        source = random.Random(-1)
        body = {
            "model": self._model, "prompt": self._prompts[0], "max_tokens": 2000,
            "ignore_eos": True, "stream": True,
        }  # fmt: skip
        while time.monotonic() < until:
            async with self._http.stream("POST", "/v1/completions", json=body):
                await asyncio.sleep(source.uniform(0.0, 6.0))

    async def liars(self, until: float) -> None:
        for lie in itertools.cycle(random.Random(1).sample(SILENT, len(SILENT))):
            if time.monotonic() >= until:
                return
            await asyncio.to_thread(self._lie, lie)
            self.lies += 1

    def _lie(self, lie: str) -> None:
        with liar(self._deployment, lie):
            time.sleep(LIE_S)

    async def uploader(self, until: float) -> None:
        """Upload strategies: each second one is good, and the others must be refused."""
        for number in itertools.count():
            if time.monotonic() >= until:
                return
            bad = BAD_UPLOADS[number // 2 % len(BAD_UPLOADS)]
            body = {"source": bad if number % 2 else GOOD_UPLOAD, "file": "soaked.py"}
            reply = await self._http.post(
                "/admin/strategies", json=body, headers=self._deployment.admin
            )
            if (reply.status_code >= 400) != bool(number % 2):
                self.outcomes[f"upload {number}: {reply.status_code} {reply.text[:200]}"] += 1
            self.uploads += 1
            await asyncio.sleep(UPLOAD_S)

    async def faults(self, until: float) -> None:
        """Stop the last engine for some seconds, or kill it; `up` starts it again."""
        for number in itertools.count():
            await asyncio.sleep(FAULT_S)
            if time.monotonic() >= until:
                return
            pid = self._pid_of_last()
            if number % 2:
                os.kill(pid, signal.SIGKILL)
            else:
                os.kill(pid, signal.SIGSTOP)
                await asyncio.sleep(3.0)
                os.kill(pid, signal.SIGCONT)
            self.faulted += 1

    def _pid_of_last(self) -> int:
        """Return the process id of the last engine, by the port that it listens on."""
        port = int(self._deployment.engines[-1].url.rpartition(":")[2])
        for process in psutil.Process(self._deployment.up.pid).children(recursive=True):
            if any(each.laddr.port == port for each in process.net_connections("tcp")
                   if each.status == psutil.CONN_LISTEN):  # fmt: skip
                return process.pid
        return self._deployment.engines[-1].pid

    async def _retries(self, request_id: str) -> Any:
        """Return how a failed request was retried."""
        path, admin = f"/admin/requests/{request_id}", self._deployment.admin
        receipt = (await self._http.get(path, headers=admin)).json()
        return {name: receipt.get(name) for name in ("retries", "fallbacks", "generation")}

    async def _one(self, source: random.Random) -> str:
        index = source.randrange(len(self._prompts))
        length = source.randrange(1, 41)
        body = {
            "model": self._model, "prompt": self._prompts[index], "max_tokens": length,
            "temperature": 0, "ignore_eos": True, "return_token_ids": True,
            "stream": source.random() < 0.7,
        }  # fmt: skip
        vanish_after = source.expovariate(2.0) if source.random() < 0.3 else None
        tokens: list[int] = []
        try:
            async with (
                asyncio.timeout(vanish_after),
                self._http.stream("POST", "/v1/completions", json=body) as reply,
            ):
                if reply.status_code != 200:
                    what = f"status {reply.status_code}: {(await reply.aread())[:200]!r}"
                    return f"{what}; {await self._retries(reply.headers['x-request-id'])}"
                async for line in reply.aiter_lines():
                    text = line.removeprefix("data: ")
                    if not text.startswith("{"):
                        continue
                    event = json.loads(text)
                    if "error" in event:
                        return f"error: {event['error']['message'][:200]}"
                    for choice in event["choices"]:
                        tokens += choice["token_ids"]
        except TimeoutError:
            return "vanished"
        return "whole" if tokens == self._wanted[index][:length] else "differing"


def leftovers(deployment: Deployment) -> dict[str, Any]:
    """Return what the router still counts after the load; check that the engines are at rest."""
    deadline = time.monotonic() + 20
    while True:
        text = httpx.get(f"{deployment.url}/metrics", timeout=30).text
        left: dict[str, Any] = {
            name: float(value)
            for name in ("requests_in_flight", "requests_waiting")
            for value in re.findall(rf"^microserve_router_{name} (\S+)$", text, re.M)
            if float(value)
        }
        for member in deployment.members():
            if any(member["load"].values()):
                left[member["id"]] = member["load"]
        if not left or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    for engine in deployment.engines:
        engine.check_at_rest()
    return left


async def load(soak: Soak, sizes: dict[str, Sizes], minutes: float, *, calm: bool) -> None:
    await soak.warm_up()
    until = time.monotonic() + 60 * minutes

    async def sampler() -> None:
        while time.monotonic() < until:
            for size in sizes.values():
                size.sample()
            await asyncio.sleep(SAMPLE_S)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(CLIENTS):
            tasks.create_task(soak.client(until))
        tasks.create_task(soak.swapper(until))
        tasks.create_task(sampler())
        if not calm:
            for disturb in (soak.slow_reader, soak.liars, soak.uploader, soak.faults):
                tasks.create_task(disturb(until))


async def run(deployment: Deployment, model: str, minutes: float, *, calm: bool) -> dict[str, Any]:
    steady = deployment.engines if calm else deployment.engines[:-1]  # the last one is killed
    pids = {"router": deployment.pid, **{e.id: e.pid for e in steady}}
    sizes = {name: Sizes(psutil.Process(pid)) for name, pid in pids.items()}
    limits = httpx.Limits(max_connections=64)
    async with httpx.AsyncClient(
        base_url=deployment.url, timeout=120, limits=limits, verify=False
    ) as http:
        soak = Soak(deployment, model, http)
        await asyncio.to_thread(soak.learn)
        await load(soak, sizes, minutes, calm=calm)
    left = await asyncio.to_thread(leftovers, deployment)
    failures = [f"left over: {left}"] if left else []
    processes = {}
    for name, size in sizes.items():
        slope, error = size.slope()
        if slope - 2 * error > (SLOPE_SHORT if minutes < SHORT_MIN else SLOPE_MIB_MIN):
            failures.append(f"{name} grows by {slope:.2f} ± {error:.2f} MiB a minute")
        third = len(size.fds) // 3
        early, late = max(size.fds[: 2 * third]), statistics.median(size.fds[2 * third :])
        if late > early:
            failures.append(f"{name} has {late} descriptors, {early} at most before")
        processes[name] = {
            "mib_first": round(size.mib[0], 1), "mib_last": round(size.mib[-1], 1),
            "mib_per_minute": round(slope, 3), "error": round(error, 3), "fds": size.fds[-1],
            "mib": [round(mib, 1) for mib in size.mib[:: max(1, len(size.mib) // 20)]],
        }  # fmt: skip
    strange = set(soak.outcomes) - {"whole", "vanished"}
    failures += [f"{soak.outcomes[outcome]} × {outcome}" for outcome in strange]
    return {
        "soak_minutes": minutes, "model": model, "outcomes": dict(soak.outcomes),
        "swaps": soak.swaps, "lies": soak.lies, "uploads": soak.uploads, "faults": soak.faulted,
        "processes": processes, "failures": failures,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--model", default="tiny", help="tiny or mock")
    parser.add_argument("--calm", action="store_true", help="without faults, lies and uploads")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        # A request may meet two liars, one after the other, and the engine with faults.
        options = ("--engines", "2", "--pool-pages", "512", "--allow-upload", "--attempts", "5")
        deployment = launch(Path(folder), flags.model, *options)
        try:
            document = asyncio.run(run(deployment, flags.model, flags.minutes, calm=flags.calm))
        finally:
            deployment.up.terminate()
            deployment.up.wait(60)
    table = Table(title="soak", title_justify="left")
    for column in ("process", "MiB first", "MiB last", "MiB/min", "descriptors"):
        table.add_column(column)
    for name, row in document["processes"].items():
        per_minute = f"{row['mib_per_minute']} ± {row['error']}"
        first, last = str(row["mib_first"]), str(row["mib_last"])
        table.add_row(name, first, last, per_minute, str(row["fds"]))
    console = Console(width=100)
    console.print(table, document["outcomes"], document["failures"] or "nothing is left over")
    print(json.dumps(document))
    return 1 if document["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
