"""The latest steps and puts with their times, for time lines. No torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from engine.protocol import TIMELINE_PUTS, TIMELINE_S, TIMELINE_STEP_REQUESTS, TIMELINE_STEPS
from engine.scheduling import Chunk, Job, Send

__all__ = ["RecentPut", "RecentStep", "RecentWork"]

NAME_BYTES = 1 << 20  # of the request ids that are kept, as characters, for steps and for puts


class RecentStep(NamedTuple):
    """A step. `requests` are some of those whose prompts it computed."""

    began: float  # seconds, by the stepper's clock
    seconds: float
    prompt_tokens: int
    decodes: int
    requests: tuple[str, ...]


class RecentPut(NamedTuple):
    """The put of a send that has succeeded, from its first copy to the end of its last one."""

    began: float  # seconds, by the stepper's clock
    seconds: float
    copying_s: float  # the part of `seconds` in which bytes were copied
    bytes: int
    request: str


T = TypeVar("T", RecentStep, RecentPut)


class RecentWork:
    """The steps and puts of the latest `TIMELINE_S` seconds; of too many, the latest ones.

    Steps are noted by the thread that steps, puts under the cache's lock; `steps` and `puts` may be
    called on any thread.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` is the stepper's: monotonic seconds, on any thread."""
        self.clock = clock
        self._steps: _Ring[RecentStep] = _Ring(TIMELINE_STEPS)
        self._puts: _Ring[RecentPut] = _Ring(TIMELINE_PUTS)

    def add_step(
        self,
        plan: Sequence[tuple[Job, Chunk]],
        began: float,
        seconds: float,
        counts: tuple[int, int],
    ) -> None:
        """Note a step of `counts` decodes and prompt tokens."""
        decodes, prompt_tokens = counts
        requests: tuple[str, ...] = ()
        names = 0
        if prompt_tokens:
            prompts = [
                job.request_id
                for job, chunk in plan
                if len(chunk.tokens) > 1 or not chunk.sample or isinstance(job, Send)
            ]
            requests = tuple(prompts[:TIMELINE_STEP_REQUESTS])
            names = sum(map(len, requests))
        self._steps.add(RecentStep(began, seconds, prompt_tokens, decodes, requests), began, names)

    def add_put(self, put: RecentPut) -> None:
        """Note a put that has ended."""
        self._puts.add(put, put.began, len(put.request))

    def steps(self, seconds: float) -> list[RecentStep]:
        """Return the steps that ended within the latest `seconds`, in the order of their ends."""
        oldest = self.clock() - seconds
        return [step for step in self._steps.all() if step.began + step.seconds >= oldest]

    def puts(self, seconds: float) -> list[RecentPut]:
        """Return the puts that ended within the latest `seconds`, in the order of their ends."""
        oldest = self.clock() - seconds
        return [put for put in self._puts.all() if put.began + put.seconds >= oldest]


class _Ring(Generic[T]):
    """The latest entries: `most` at most, with names of `NAME_BYTES`, begun in `TIMELINE_S`."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._entries: deque[tuple[T, float, int]] = deque()
        self._names = 0

    def add(self, entry: T, began: float, names: int) -> None:
        entries = self._entries
        entries.append((entry, began, names))
        self._names += names
        oldest = began - TIMELINE_S
        while (
            len(entries) > self._most or self._names > NAME_BYTES or entries[0][1] < oldest
        ) and len(entries) > 1:
            self._names -= entries.popleft()[2]

    def all(self) -> list[T]:
        return [entry for entry, _, _ in tuple(self._entries)]
