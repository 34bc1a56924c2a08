"""Is advice worth following? Prompts become long; what is proposed is applied, and measured.

`make advise-trial` starts `up` with two engines of the model `mock`, whose pace is set so that the
engines and not the host decide, and `data_parallel`. It sends short prompts, then long ones, and
runs `microserve advise --apply` on the traffic of the long ones. When the canary has been promoted,
it sends requests of the same lengths at the same times again, with other tokens, and compares the
mean time of a request (JCT). Each trial has a deployment, lengths and times of its own. Prints a
line for each trial, and one JSON document; the exit code is 1 if a trial was not better.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx
from e2e_deployment import Deployment, deployed

from router.engines import HttpClient
from router.load import Target, open_loop
from router.workload import WorkloadConfig, open_workload

STEP_MS, TOKENS_PER_MS = 20.0, 8.0
FLAGS = (
    "--engines", "2", "--step-ms", str(STEP_MS), "--prefill-tokens-per-ms", str(TOKENS_PER_MS),
)  # fmt: skip
OUTPUT = 60
SHORT, LONG = (32, 160), (1200, 2600)  # prompt tokens
SHORT_RATE, LONG_RATE = 3.0, 2.4  # requests per second
SHORT_REQUESTS, LONG_REQUESTS = 30, 50
CANARY, JUDGED = 50.0, 10  # its share (%), and the number of requests after which it is judged
PROMOTED_S = 30.0  # after the requests that it is judged by


def trace(
    file: Path, source: random.Random, rate: float, lengths: tuple[int, int], count: int
) -> str:
    """Write a trace of Poisson arrivals with uniform lengths; return its path."""
    at, lines = 0.0, []
    for _ in range(count):
        at += source.expovariate(rate)
        fields = {
            "at_s": at, "input_tokens": source.randint(*lengths), "output_tokens": OUTPUT,
            "pages": [],
        }  # fmt: skip
        lines.append(json.dumps(fields))
    file.write_text("\n".join(lines))
    return str(file)


def send(deployment: Deployment, workload: str, seed: int, count: int | None = None) -> float:
    """Send the requests of a trace at their times; return the mean JCT (ms)."""

    async def run() -> float:
        client = HttpClient(deployment.url)
        try:
            target = Target(client, "mock", {"ignore_eos": True, "temperature": 0})
            requests = list(open_workload(WorkloadConfig(name=workload, seed=seed)).requests)
            outcomes = await open_loop(target, iter(requests[:count]))
        finally:
            client.close()
        failed = [outcome.error for outcome in outcomes if not outcome.ok]
        assert not failed, failed[:3]
        return 1e3 * fmean(outcome.end_s for outcome in outcomes)

    return asyncio.run(run())


def advise(deployment: Deployment, *flags: str) -> dict[str, Any]:
    """Run `microserve advise`; return its JSON document. Its table goes to standard error."""
    key = deployment.admin.get("Authorization", "").removeprefix("Bearer ")
    keys = ["--admin-key", key] if key else []
    command = [sys.executable, "-m", "router", "advise", "--url", deployment.url, *keys, *flags]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    *said, document = done.stdout.splitlines()
    print("\n".join(said), file=sys.stderr)
    return json.loads(document)


def wait_for_promotion(deployment: Deployment) -> None:
    deadline = time.monotonic() + PROMOTED_S
    while True:
        state = httpx.get(
            f"{deployment.url}/admin/strategies", headers=deployment.admin, timeout=30
        ).json()
        if state["canary"] is None:
            break
        assert time.monotonic() < deadline, state["canary"]
        time.sleep(0.1)
    assert state["last_canary"]["decision"] == "promoted", state["last_canary"]


def trial(folder: Path, number: int) -> dict[str, Any]:
    """Run one trial; return what was expected and what was measured."""
    source = random.Random(number)
    short = trace(folder / "short.jsonl", source, SHORT_RATE, SHORT, SHORT_REQUESTS)
    long = trace(folder / "long.jsonl", source, LONG_RATE, LONG, LONG_REQUESTS)
    with deployed(folder, "mock", *FLAGS) as deployment:
        send(deployment, short, 1)
        kept = advise(deployment, "--candidate", "prefill_decode")
        began = time.monotonic()
        before = send(deployment, long, 1)
        minutes = (time.monotonic() - began) / 60
        advice = advise(
            deployment, "--minutes", f"{minutes:.4f}", "--apply", "--canary", str(CANARY),
            "--min-requests", str(JUDGED),
        )  # fmt: skip
        after = before
        if not advice["keep"]:
            if advice["applied"]["generation"] is not None:
                send(deployment, long, 2, round(JUDGED * 100 / CANARY) + 2)
                wait_for_promotion(deployment)
            after = send(deployment, long, 3)
    proposal = advice["proposal"] or {}
    now = next(row for row in advice["ranking"] if row["current"])
    return {
        "trial": number, "for_short_prompts": kept["why"], "proposal": proposal.get("title"),
        "expected_gain": proposal.get("gain"), "spread": proposal.get("spread"),
        "measured_gain": 1 - after / before,
        "jct_before_ms": before, "simulated_before_ms": now["jct_ms"],
        "jct_after_ms": after, "simulated_after_ms": proposal.get("jct_ms"),
        "requests": advice["traffic"]["requests"],
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--first", type=int, default=1, help="number of the first trial")
    flags = parser.parse_args()
    trials = []
    for number in range(flags.first, flags.first + flags.trials):
        with tempfile.TemporaryDirectory() as folder:
            trials.append(trial(Path(folder), number))
        print(trials[-1], file=sys.stderr)
    better = sum(one["measured_gain"] > 0 for one in trials)
    print(json.dumps({"trials": trials, "better": better}))
    return 0 if better == len(trials) else 1


if __name__ == "__main__":
    sys.exit(main())
