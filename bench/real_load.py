"""What benches share that run made-up requests on real engines: requests, times, throughput."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from router.load.client import Outcome, Target, closed_loop
from router.workload import LoadRequest, WorkloadConfig, open_workload

__all__ = ["BODY", "TIMES", "check", "throughput", "unseen_requests"]

WORD = "260"  # of all answers: its text is never held back, as that of half a character is
BODY: Mapping[str, Any] = {"ignore_eos": True, "logit_bias": {WORD: 100}}
# Seconds of a request, by name; of an `Outcome` as of a simulation's `RequestRecord`.
TIMES: Mapping[str, Callable[[Any], float | None]] = {
    "ttft": lambda one: one.first_token_s,
    "tpot": lambda one: one.per_token_s,
    "jct": lambda one: one.end_s,
}
FIRST_ID, IDS = 10, 290  # token ids of made-up prompts
runs = itertools.count(1)


def unseen_requests(workload: WorkloadConfig, count: int) -> Iterator[LoadRequest]:
    """Yield requests whose first tokens differ from those of all others, also of earlier calls.

    So nothing of their prompts is in a cache.
    """
    run = next(runs)
    for index, request in enumerate(itertools.islice(open_workload(workload).requests, count)):
        prompt = list(request.body["prompt"])
        parts = (run % IDS, run // IDS, index % IDS, index // IDS)
        prompt[: len(parts)] = [FIRST_ID + part for part in parts]
        yield replace(request, body={**request.body, "prompt": prompt})


async def throughput(target: Target, requests: Iterator[LoadRequest], most: int) -> float:
    """Send the requests, `most` of them at a time; return requests per second.

    Raises `SystemExit` if a request failed.
    """
    began = time.perf_counter()
    outcomes = await closed_loop(target, requests, most)
    check(outcomes)
    return len(outcomes) / (time.perf_counter() - began)


def check(outcomes: Sequence[Outcome]) -> None:
    """Raise `SystemExit` if a request failed."""
    if wrong := [outcome for outcome in outcomes if not outcome.ok]:
        raise SystemExit(f"{len(wrong)} requests failed: {wrong[0].status} {wrong[0].error}")
