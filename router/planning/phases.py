"""Prefill and decode instances as queues in virtual time, as DistServe's simulator has them.

What it models (Zhong et al. 2024, §4, and the public simulator `simdistserve`):

- Prefill: requests wait first come, first served. When the first stage is free, it takes the
  waiting prompts in turn, whole, up to a number of tokens; the first one always.
- Decode: continuous batching. A request joins once its prompt's KV is there and the pool has room
  for its prompt and all its output, first come, first served. A batch has a largest size.
- Pipelines: batches pass `pp` stages one after the other. A decode instance has `pp` batches, and
  a request joins the smallest one.
- Steps take the time of the latency model, and a fixed overhead in the first stage.

It does not model: prefix caching, chunks of prompts, links that puts share, preemption, prefills
that wait for a full decode instance, and failures. `router/simulation` has all of these.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from engine.latency import StepWork
from engine.protocol import BadRequest
from router.planning.instances import Instance
from router.planning.stages import Stages

__all__ = [
    "NO_OVERHEAD",
    "Arrival",
    "Overhead",
    "decode_ends",
    "decode_order",
    "prefill_batches",
    "prefill_ends",
]


class Arrival(NamedTuple):
    """A request: when it comes (s), and its prompt and output in tokens."""

    at_s: float
    prompt: int
    output: int


class Overhead(NamedTuple):
    """What scheduling adds to each step: a fixed time, and more per token in the batch (ms)."""

    step_ms: float = 0.0
    token_ms: float = 0.0

    def seconds(self, tokens: int) -> float:
        """Return the overhead of a step with this many tokens of prompts and contexts."""
        return (self.step_ms + self.token_ms * tokens) / 1e3


NO_OVERHEAD = Overhead()


def prefill_ends(
    arrivals: Sequence[Arrival],
    instance: Instance,
    *,
    max_tokens: int,
    overhead: Overhead = NO_OVERHEAD,
) -> list[float]:
    """Return when each request, in the order of arrival, has its first token (s)."""
    ends = [0.0] * len(arrivals)
    for first, last, end in prefill_batches(
        arrivals, instance, max_tokens=max_tokens, overhead=overhead
    ):
        ends[first:last] = [end] * (last - first)
    return ends


def prefill_batches(
    arrivals: Sequence[Arrival],
    instance: Instance,
    *,
    max_tokens: int,
    overhead: Overhead = NO_OVERHEAD,
) -> Iterator[tuple[int, int, float]]:
    """Yield each batch: its first request, the one after its last, and when it has ended (s)."""
    stages, first = Stages(instance.division.pp), 0
    while first < len(arrivals):
        start = max(stages.free_s, arrivals[first].at_s)
        tokens = squares = 0
        last = first
        while last < len(arrivals) and arrivals[last].at_s <= start:
            length = arrivals[last].prompt
            if last > first and tokens + length > max_tokens:
                break
            tokens += length
            squares += length * length
            last += 1
        seconds = instance.step.seconds(StepWork(tokens, squares))
        yield first, last, stages.enter(start, seconds, overhead.seconds(tokens))
        first = last


def decode_ends(
    arrivals: Sequence[Arrival],
    instance: Instance,
    *,
    max_batch: int,
    overhead: Overhead = NO_OVERHEAD,
) -> list[float]:
    """Return when each request has its last token (s); `at_s` is when its prompt's KV is there.

    The first token is there by then too, so a request takes `output - 1` steps. `arrivals` are in
    the order of `at_s`.

    Raises: `BadRequest` if a request exceeds the pool.
    """
    ends = [0.0] * len(arrivals)
    for number, end in decode_order(arrivals, instance, max_batch=max_batch, overhead=overhead):
        ends[number] = end
    return ends


def decode_order(
    arrivals: Sequence[Arrival],
    instance: Instance,
    *,
    max_batch: int,
    overhead: Overhead = NO_OVERHEAD,
) -> Iterator[tuple[int, float]]:
    """Yield each request's number and when it has its last token (s), as `decode_ends` says.

    They come in the order in which batches end them, and those of one token when they would join.

    Raises: `BadRequest` if a request exceeds the pool.
    """
    longest = max((each.prompt + each.output for each in arrivals), default=0)
    if longest > instance.pool_tokens:
        raise BadRequest(
            f"a request of {longest} tokens exceeds the pool of {instance.pool_tokens} tokens "
            f"of an instance with {instance.division}"
        )
    return _Decoder(arrivals, instance, max_batch, overhead).run()


class _Batch:
    """The requests that decode together. A request ends at a step of the batch."""

    def __init__(self) -> None:
        self.steps = 0
        self.count = 0
        self.context = 0
        self.ends: list[tuple[int, int]] = []  # a heap of (last step, request)
        self.joining: list[tuple[int, Arrival]] = []  # from its next step on

    def gather(self) -> None:
        """Let the requests in that join."""
        for number, request in self.joining:
            heapq.heappush(self.ends, (self.steps + request.output - 1, number))
            self.count += 1
            self.context += request.prompt
        self.joining.clear()

    def step(self) -> list[int]:
        """Note a step, and return the requests that end with it."""
        self.steps += 1
        self.context += self.count
        ended = []
        while self.ends and self.ends[0][0] <= self.steps:
            ended.append(heapq.heappop(self.ends)[1])
        return ended

    def leave(self, request: Arrival) -> None:
        """Let a request out that has ended."""
        self.count -= 1
        self.context -= request.prompt + request.output - 1


class _Decoder:
    def __init__(
        self, arrivals: Sequence[Arrival], instance: Instance, max_batch: int, overhead: Overhead
    ) -> None:
        self._arrivals = arrivals
        self._step = instance.step
        self._overhead = overhead
        self._max_batch = max_batch
        self._room = instance.pool_tokens
        self._stages = Stages(instance.division.pp)
        self._batches = [_Batch() for _ in range(instance.division.pp)]
        self._sizes = [0] * len(self._batches)  # requests, with those that join at the next step
        self._idle = set(range(len(self._batches)))
        self._next = 0

    def run(self) -> Iterator[tuple[int, float]]:
        returns: list[tuple[float, int]] = []  # a heap of when batches are ready for a step
        while self._next < len(self._arrivals) or returns:
            now = self._next_start(returns[0][0] if returns else float("inf"))
            if returns and returns[0][0] <= now:
                now, index = heapq.heappop(returns)
                self._idle.add(index)
                for number in self._batches[index].step():
                    self._leave(index, self._arrivals[number])
                    yield number, now
            yield from self._admit(now)
            for index in sorted(self._idle):
                if self._sizes[index]:
                    heapq.heappush(returns, (self._pass(index, now), index))

    def _next_start(self, returned_s: float) -> float:
        """Return when a batch returns, or a request comes before that to an empty batch."""
        if self._next < len(self._arrivals) and 0 in self._sizes:
            request = self._arrivals[self._next]
            if request.prompt + request.output <= self._room:
                return min(returned_s, request.at_s)
        return returned_s

    def _admit(self, now: float) -> list[tuple[int, float]]:
        """Let the requests join that are there and have room. Return those that have ended then."""
        arrivals, sizes = self._arrivals, self._sizes
        ended = []
        while self._next < len(arrivals) and arrivals[self._next].at_s <= now:
            request = arrivals[self._next]
            size = request.prompt + request.output
            least = min(sizes)
            if size > self._room or least >= self._max_batch:
                break
            if request.output > 1:
                index = sizes.index(least)
                self._room -= size
                sizes[index] += 1
                self._batches[index].joining.append((self._next, request))
            else:
                ended.append((self._next, request.at_s))
            self._next += 1
        return ended

    def _pass(self, index: int, now: float) -> float:
        """Send a batch through the stages for a step, and return when it comes back."""
        self._idle.remove(index)
        batch = self._batches[index]
        batch.gather()
        work = StepWork(decodes=batch.count, context=batch.context)
        extra = self._overhead.seconds(batch.context)
        return self._stages.enter(now, self._step.seconds(work), extra)

    def _leave(self, index: int, request: Arrival) -> None:
        self._batches[index].leave(request)
        self._sizes[index] -= 1
        self._room += request.prompt + request.output
