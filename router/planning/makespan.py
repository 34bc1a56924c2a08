"""Microbatches in pipelines of machines, in virtual time: when they end, and what that costs.

DéjàVu's simulator (Strati et al. 2024, appendix B). All requests of a microbatch generate as many
tokens. Microbatches stop at different times, and the next one begins with its prompt then. A stage
serves one microbatch at a time in the order of entry, so a prompt delays the tokens behind it.

It models no memory (see `least_machines`), and transfers only as a factor on prompt times.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from engine.protocol import BadRequest
from router.planning.stages import Stages

__all__ = ["Job", "Served", "colocated", "data_parallel", "disaggregated"]


@dataclass(frozen=True, slots=True)
class Job:
    """A microbatch: when it comes (s), and how many tokens it generates after its prompt."""

    at_s: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Served:
    """When each job ended (s), on how many machines."""

    ends_s: tuple[float, ...]
    machines: int

    @property
    def makespan_s(self) -> float:
        """When the last job ended."""
        return max(self.ends_s)

    def cost(self, hourly: float) -> float:
        """Return the cost of all machines for the makespan, at a price per machine and hour."""
        return self.machines * self.makespan_s / 3600 * hourly


def colocated(jobs: Sequence[Job], depth: int, prompt_s: float, token_s: float) -> Served:
    """Run prompts and tokens in one pipeline of `depth` machines, with as many jobs under way.

    `prompt_s` and `token_s` are those of the whole model on one machine. `jobs` are in the order of
    `at_s`.
    """
    stages = Stages(_checked(depth))
    return Served(_run(jobs, stages, prompt_s / depth, token_s / depth), depth)


def data_parallel(
    jobs: Sequence[Job], pipelines: int, depth: int, prompt_s: float, token_s: float
) -> Served:
    """Run as `colocated` on several pipelines, which get the jobs in turn."""
    ends = [0.0] * len(jobs)
    for number in range(_checked(pipelines)):
        part = colocated(jobs[number::pipelines], depth, prompt_s, token_s)
        ends[number::pipelines] = part.ends_s
    return Served(tuple(ends), pipelines * depth)


def disaggregated(
    jobs: Sequence[Job],
    prompt_depth: int,
    token_depth: int,
    prompt_s: float,
    token_s: float,
    streaming: float = 1.0,
) -> Served:
    """Run prompts in a pipeline of their own, whose times are `streaming` times as long."""
    prompts = Stages(_checked(prompt_depth))
    ready = [prompts.enter(job.at_s, streaming * prompt_s / prompt_depth) for job in jobs]
    moved = [Job(at_s, job.tokens) for at_s, job in zip(ready, jobs, strict=True)]
    ends = _run(moved, Stages(_checked(token_depth)), None, token_s / token_depth)
    return Served(ends, prompt_depth + token_depth)


def _run(
    jobs: Sequence[Job], stages: Stages, prompt_s: float | None, token_s: float
) -> tuple[float, ...]:
    """Run jobs, as many at a time as there are stages. `prompt_s` `None`: prompts are done."""
    ends = [0.0] * len(jobs)
    passes: list[tuple[float, int, int]] = []  # a heap of (ready, job, passes that it has made)
    before = 0 if prompt_s is None else 1

    def start(number: int, free_s: float) -> None:
        if number < len(jobs):
            heapq.heappush(passes, (max(jobs[number].at_s, free_s), number, 0))

    for number in range(stages.count):
        start(number, 0.0)
    following = stages.count
    while passes:
        now, number, made = heapq.heappop(passes)
        if made == before + jobs[number].tokens:
            ends[number] = now
            start(following, now)
            following += 1
            continue
        seconds = token_s if prompt_s is None or made else prompt_s
        heapq.heappush(passes, (stages.enter(now, seconds), number, made + 1))
    return tuple(ends)


def _checked(count: int) -> int:
    if count < 1:
        raise BadRequest(f"a pipeline has 1 machine or more, not {count}")
    return count
