"""A model of engines in virtual time, with steps, chunks and queues like the scheduler's.

A step takes `STEP_S`, plus `STREAM_S` for each stream and `TOKEN_S` for each prefilled token. It
computes one token of every stream and prefills up to `BUDGET` tokens, first come first served. A
send is a prefill whose request then goes to its decode engine.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Protocol

from router import Chunk
from strategies.controller import Controller

STEP_S, STREAM_S, TOKEN_S, BUDGET = 0.028, 0.0035, 0.00142, 512  # SmolLM2 in bfloat16 on a core


@dataclass(eq=False)
class Job:
    """One request."""

    at: float
    tokens: int
    output: int
    share: int = 0  # tokens that the prefill engine computes
    division: Division | None = None
    drawn: int = 0
    first: float = 0.0
    end: float = 0.0


class Division(Protocol):
    """A request's division, as the strategy uses it."""

    prefill_tokens: int

    def sent(self, computed: int) -> None: ...
    def received(self, chunk: Chunk) -> None: ...


@dataclass(eq=False)
class ModelEngine:
    id: str
    slower: float = 1.0
    prefills: list[list] = field(default_factory=list)  # [job, tokens left, callback]
    streams: list[Job] = field(default_factory=list)
    ends: float | None = None  # when the step under way ends
    work: int = 0  # tokens and streams assigned to the engine, as the router counts load

    def plan(self, now: float) -> None:
        if self.ends is not None or not (self.prefills or self.streams):
            return
        budget, self.step = BUDGET, []
        for item in self.prefills:
            if budget <= 0:
                break
            chunk = min(budget, item[1])
            self.step.append((item, chunk))
            budget -= chunk
        self.decoding = list(self.streams)
        took = STEP_S + STREAM_S * len(self.decoding) + TOKEN_S * (BUDGET - budget)
        self.ends = now + took * self.slower


class Model:
    """A deployment of prefill and decode engines.

    `divide(model, job, prefill, decode)` returns how many tokens the prefill engine computes, or
    enters a controller's division.
    """

    def __init__(
        self,
        divide: Callable[[Model, Job, ModelEngine, ModelEngine], int],
        prefills: int = 1,
        decodes: int = 1,
        *,
        slower: Sequence[float] = (),
    ) -> None:
        self.now = 0.0
        self.prefills = [ModelEngine(f"p{n}") for n in range(prefills)]
        self.decodes = [ModelEngine(f"d{n}") for n in range(decodes)]
        self.engines = [*self.prefills, *self.decodes]
        for engine, factor in zip(self.engines, slower, strict=False):
            engine.slower = factor
        self._divide = divide
        self._exits: dict[Job, AbstractContextManager] = {}

    def run(self, jobs: Sequence[Job]) -> None:
        """Run until all jobs have ended."""
        coming = list(reversed(jobs))
        while coming or any(engine.ends is not None for engine in self.engines):
            times = [engine.ends for engine in self.engines if engine.ends is not None]
            self.now = min([*times, *(job.at for job in coming[-1:])])
            if coming and coming[-1].at == self.now:
                self._arrive(coming.pop())
            for engine in self.engines:
                if engine.ends == self.now:
                    self._step(engine)
            for engine in self.engines:
                engine.plan(self.now)

    def _arrive(self, job: Job) -> None:
        decode = min(self.decodes, key=lambda engine: engine.work)
        prefill = min(self.prefills, key=lambda engine: engine.work)
        exits = self._exits[job] = ExitStack()
        share = self._divide(self, job, prefill, decode)
        if isinstance(share, int):
            job.share = share
        else:
            job.division = exits.enter_context(share)
            job.share = job.division.prefill_tokens
        decode.work += 32
        if job.share:
            prefill.work += job.share
            prefill.prefills.append([job, job.share, lambda: self._sent(job, prefill, decode)])
        else:
            self._chunk(job, decode)

    def _sent(self, job: Job, prefill: ModelEngine, decode: ModelEngine) -> None:
        prefill.work -= job.share
        if job.division is not None:
            job.division.sent(job.share)
        self._chunk(job, decode)

    def _chunk(self, job: Job, decode: ModelEngine) -> None:
        rest = job.tokens - job.share
        decode.work += rest

        def first() -> None:
            decode.work -= rest
            job.first = self.now
            decode.streams.append(job)
            self._draw(job, decode)

        decode.prefills.append([job, rest, first])

    def _draw(self, job: Job, engine: ModelEngine) -> None:
        job.drawn += 1
        over = job.drawn == job.output
        if job.division is not None:
            job.division.received(Chunk([1], finish_reason="length" if over else None))
        if over:
            job.end = self.now
            engine.streams.remove(job)
            engine.work -= 32
            self._exits.pop(job).close()

    def _step(self, engine: ModelEngine) -> None:
        engine.ends = None
        for job in engine.decoding:
            self._draw(job, engine)
        for item, chunk in engine.step:
            item[1] -= chunk
            if not item[1]:
                engine.prefills.remove(item)
                item[2]()


def fixed(ratio: float) -> Callable[[Model, Job, ModelEngine, ModelEngine], int]:
    def divide(model: Model, job: Job, prefill: ModelEngine, decode: ModelEngine) -> int:
        return min(job.tokens - 1, round(job.tokens * (1 - ratio)))

    return divide


def controlled(model_of: Callable[[], Model]) -> Callable:
    controller = Controller(lambda: model_of().now)

    def divide(model: Model, job: Job, prefill: ModelEngine, decode: ModelEngine):
        return controller.divide(
            job.tokens,
            prefill=prefill.id,
            decode=decode.id,
            prefills=[engine.id for engine in model.prefills],
            decodes=[engine.id for engine in model.decodes],
        )

    return divide


def poisson(seed: int, count: int, *, rate: float, tokens: int, output: int) -> list[Job]:
    source, at, jobs = random.Random(seed), 0.0, []
    for _ in range(count):
        at += source.expovariate(rate)
        jobs.append(Job(at, tokens, output))
    return jobs


def mean_time(jobs: Sequence[Job]) -> float:
    return statistics.fmean(job.end - job.at for job in jobs)


def shares(jobs: Sequence[Job]) -> Iterator[float]:
    """Yield the decode engine's share of each job's tokens."""
    return ((job.tokens - job.share) / job.tokens for job in jobs)
