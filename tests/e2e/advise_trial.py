"""Is advice worth following? Prompts become long; what is proposed is applied, and measured.

`make advise-trial` starts `up` with two engines. It sends short prompts, then long ones, and runs
`microserve advise --apply` on the traffic of the long ones. When the canary has been promoted, it
sends requests of the same lengths at the same times again, with other tokens, and compares the mean
time of a request (JCT). Each trial has a deployment, lengths and times of its own. Prints a line
for each trial, and one JSON document; the exit code is 1 if a trial was not better.

`--model mock`: engines whose pace is set, so that they and not the host decide, begin with
`data_parallel`; long prompts hold up the decodes beside them. `--model smollm2`: engines that
compute, with a thread each, begin with `prefill_decode`; its one engine for prompts is then full.
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
from typing import Any, NamedTuple

import httpx
from e2e_deployment import Deployment, deployed

from router.engines import HttpClient
from router.load import Target, open_loop
from router.workload import WorkloadConfig, open_workload


class Phase(NamedTuple):
    """Requests of one kind, with Poisson arrivals and uniform lengths."""

    prompt: tuple[int, int]  # tokens, least and most
    rate: float  # requests per second
    requests: int


class Case(NamedTuple):
    """A deployment of `up`, and what it serves."""

    flags: tuple[str, ...]
    other: str  # the strategy that advice for short prompts is about
    short: Phase
    long: Phase


CASES = {
    "mock": Case(
        ("--engines", "2", "--step-ms", "20", "--prefill-tokens-per-ms", "8"),
        "prefill_decode",
        Phase((32, 160), 3.0, 30),
        Phase((1200, 2600), 2.4, 50),
    ),
    "smollm2": Case(
        ("--prefill", "1", "--decode", "1", "--threads", "1", "--strategy", "prefill_decode"),
        "data_parallel",
        Phase((16, 64), 2.0, 30),
        Phase((1200, 2600), 0.7, 40),
    ),
}
OUTPUT = 60
CANARY, JUDGED = 50.0, 10  # its share (%), and the number of requests after which it is judged
PROMOTED_S = 30.0  # after the requests that it is judged by


def trace(file: Path, source: random.Random, phase: Phase) -> str:
    """Write a trace of a phase; return its path."""
    at, lines = 0.0, []
    for _ in range(phase.requests):
        at += source.expovariate(phase.rate)
        fields = {
            "at_s": at, "input_tokens": source.randint(*phase.prompt), "output_tokens": OUTPUT,
            "pages": [],
        }  # fmt: skip
        lines.append(json.dumps(fields))
    file.write_text("\n".join(lines))
    return str(file)


def send(
    deployment: Deployment, model: str, workload: str, seed: int, count: int | None = None
) -> float:
    """Send the requests of a trace at their times; return the mean JCT (ms)."""

    async def run() -> float:
        client = HttpClient(deployment.url)
        try:
            target = Target(client, model, {"ignore_eos": True, "temperature": 0})
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


def trial(folder: Path, model: str, number: int) -> dict[str, Any]:
    """Run one trial; return what was expected and what was measured."""
    case, source = CASES[model], random.Random(number)
    short = trace(folder / "short.jsonl", source, case.short)
    long = trace(folder / "long.jsonl", source, case.long)
    with deployed(folder, model, *case.flags) as deployment:
        send(deployment, model, short, 1)
        kept = advise(deployment, "--candidate", case.other)
        began = time.monotonic()
        before = send(deployment, model, long, 1)
        minutes = (time.monotonic() - began) / 60
        advice = advise(
            deployment, "--minutes", f"{minutes:.4f}", "--apply", "--canary", str(CANARY),
            "--min-requests", str(JUDGED),
        )  # fmt: skip
        after = before
        if not advice["keep"]:
            if advice["applied"]["generation"] is not None:
                send(deployment, model, long, 2, round(JUDGED * 100 / CANARY) + 2)
                wait_for_promotion(deployment)
            after = send(deployment, model, long, 3)
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
    parser.add_argument("--model", choices=CASES, default="mock")
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--first", type=int, default=1, help="number of the first trial")
    flags = parser.parse_args()
    trials = []
    for number in range(flags.first, flags.first + flags.trials):
        with tempfile.TemporaryDirectory() as folder:
            trials.append(trial(Path(folder), flags.model, number))
        print(trials[-1], file=sys.stderr)
    better = sum(one["measured_gain"] > 0 for one in trials)
    print(json.dumps({"model": flags.model, "trials": trials, "better": better}))
    return 0 if better == len(trials) else 1


if __name__ == "__main__":
    sys.exit(main())
