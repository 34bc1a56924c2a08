"""The steps of a virtual engine: a `Stepper` whose steps take the time of a latency model.

    begin ──► a step, or equal steps in a row ──► end ──► begin …      idle: until the stepper wakes

Steps that only decode, and after which nothing is different, are equal: the same sequences, each a
token longer. They are not stepped through. One timer stands for the whole row. Whoever looks at the
engine, or gives it work, first brings it up to date (`settle`): the steps that have ended by then
take effect together, and the row goes on from the one that is under way.
"""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.execution.step_output import PlannedStep, StepOutput
from engine.execution.step_timings import step_work
from engine.execution.stepper import Stepper
from engine.latency import Factors, StepWork
from engine.sampling.sampled import Sampled
from engine.scheduling import Chunk, Generation, Scheduler
from engine.virtual.cache import VirtualCache
from engine.virtual.compute import Compute
from engine.virtual.loans import RemoteAttention, RemoteWork
from engine.virtual.tokens import output_state, tokens_from
from kvcache.lending import CreditorFailed
from kvcache.types import SeqId

__all__ = ["MOST_AT_ONCE", "VirtualSteps"]

MOST_AT_ONCE = 64  # equal steps in a row
SWEEP_S = 0.5  # between two checks of leases; less than what counts as a pause of the process


@dataclass(slots=True)
class Row:
    """`count` equal steps from `began` on; the i-th (from 0) takes `first_s + i * growth_s`.

    With `factors`, each takes so much longer or shorter.
    """

    step: PlannedStep
    chunks: list[Chunk]
    began: float
    first_s: float
    growth_s: float
    count: int
    work: StepWork  # of the first one
    factors: Factors | None = None
    remote: Sequence[RemoteWork] = ()  # what creditors compute of each step
    longer_s: float = 0.0  # of each step, for debtors; within `first_s`

    def seconds(self, steps: int) -> float:
        """Return how long the first `steps` steps take."""
        if self.factors is not None:
            return self.factors.seconds(self.first_s, self.growth_s, steps)
        return steps * self.first_s + self.growth_s * (steps * (steps - 1) / 2)

    def durations(self, steps: int) -> list[float]:
        """Return how long each of the first `steps` steps takes."""
        planned = [self.first_s + i * self.growth_s for i in range(steps)]
        if self.factors is None:
            return planned
        factors = self.factors.next(steps)
        return [seconds * factor for seconds, factor in zip(planned, factors, strict=True)]

    def ended(self, now: float) -> int:
        """Return how many steps have ended by `now`."""
        if self.factors is not None:
            took = range(1, self.count + 1)
            return bisect_right(took, now, key=lambda steps: self.began + self.seconds(steps))
        passed, growth = now - self.began, self.growth_s
        if growth > 0:
            half = self.first_s - growth / 2
            most = (math.sqrt(half * half + 2 * growth * passed) - half) / growth
        else:
            most = passed / self.first_s
        steps = int(min(most, self.count))
        while steps and self.began + self.seconds(steps) > now:
            steps -= 1  # rounding
        return steps


class PageUse:
    """How many pages are in use: the mean over time, and the most at the beginning of a step."""

    __slots__ = ("_area", "_at", "_began", "_pages", "peak")

    def __init__(self, now: float) -> None:
        self.peak = 0
        self._pages = 0
        self._area = 0.0  # page-seconds until `_at`
        self._began = self._at = now

    def note(self, pages: int, now: float) -> None:
        """So many are in use from now on."""
        self._area += self._pages * (now - self._at)
        self._pages, self._at = pages, now
        if pages > self.peak:
            self.peak = pages

    def mean(self, now: float) -> float:
        """Return the mean from the beginning until now."""
        passed = now - self._began
        return (self._area + self._pages * (now - self._at)) / passed if passed else 0.0


class VirtualSteps:
    """Drives a stepper on the event loop; its runner and its sampling at the same time."""

    def __init__(
        self,
        cache: VirtualCache,
        scheduler: Scheduler,
        compute: Compute,
        deliver: Callable[[list[StepOutput]], object],
        *,
        most_at_once: int = MOST_AT_ONCE,
        scatter: Sequence[float] = (),
        remote: RemoteAttention | None = None,
    ) -> None:
        """Not more than `most_at_once` equal steps are skipped over at a time; 1: none.

        `scatter` are factors of steps' times, as of `engine.latency.Scatter`. `compute` is the
        device that debtors use too, and `remote` what creditors compute for this engine.
        """
        self._loop = asyncio.get_running_loop()
        self._cache = cache
        self._scheduler = scheduler
        self._latency = compute.latency
        self._factors = Factors(tuple(scatter), most_at_once) if scatter else None
        self._most = most_at_once
        self._compute, self._remote = compute, remote
        self._now = self._loop.time()  # the end of the latest step
        self._row: Row | None = None
        self._ending: Row | None = None  # whose steps take effect
        self._times = 1  # steps that end together
        self._timer: asyncio.TimerHandle | None = None
        self._stepping = False  # a step is taking effect, or being planned
        self._stopped = False
        self._submitted: list[Generation] = []  # for the step after the row
        self._states: dict[SeqId, int] = {}  # of outputs
        self.busy_s = 0.0  # time in steps, since the start
        self.pages = PageUse(self._now)
        self.on_steps: Callable[[Row, int], object] | None = None  # rows, and the steps that ended
        self.stepper = Stepper(cache, scheduler, self, self._sample, deliver, self._clock)
        self.stepper.sweep_s = SWEEP_S
        self.stepper.wake = self.wake

    def settle(self) -> None:
        """Bring the engine up to date: the steps that have ended by now take effect."""
        now = self._loop.time()
        while (row := self._row) is not None and row.count > 1:
            ended = row.ended(now)
            past = ended == row.count and row.began + row.seconds(ended) < now
            if ended == row.count and not past:  # the last one ends now, when its timer says so
                ended -= 1
            if not ended:
                return
            self._end(row, ended)
            if past:
                self._take_in()
            self._begin()
            if self._submitted and (row := self._row) is not None and row.count > 1:
                self._shorten(row, 1)
                self._wait_for(row)

    def cut(self) -> None:
        """Let the step that is under way be the last of its row: something is about to change."""
        self.settle()
        row = self._row
        if row is not None and row.count > 1:
            self._shorten(row, 1)
            self._wait_for(row)

    def submit(self, generation: Generation) -> None:
        """Give the stepper a generation, after the step that is under way.

        That step becomes the last of its row. The steps that have ended take effect with it, unless
        pages are short: who submits has not looked at the engine.
        """
        row = self._row
        ended = 0 if row is None else row.ended(self._loop.time())
        if row is None or not ended or not self._cache.has_free(row.chunks, ended + 1):
            self.cut()
        elif ended + 1 < row.count:
            self._shorten(row, ended + 1)
            self._wait_for(row)
        if self._row is None:
            self.stepper.submit(generation)
        else:
            self._submitted.append(generation)

    def abort(self, generation: Generation) -> None:
        """See `Stepper.abort`."""
        self.cut()
        if generation in self._submitted:
            self._submitted.remove(generation)
        self.stepper.abort(generation)

    def forget(self, generation: Generation) -> None:
        """Drop what is kept of an ended generation. Idempotent."""
        self._states.pop(generation.seq_id, None)
        if self._remote is not None:
            self._remote.forget(generation.seq_id)

    def stop(self) -> None:
        """Compute nothing further: the engine has died."""
        self._stopped = True
        self._submitted.clear()
        self._set_timer(None, self._begin)
        row, self._row = self._row, None
        if row is not None and self._remote is not None:
            self._remote.end(row.remote, self._now)

    def wake(self) -> None:
        """Begin a step soon, unless one is under way. Calls of the same moment share it.

        Whoever gives the stepper work calls `cut` before: a step that began earlier must not take
        it in.
        """
        if self._row is None and not self._stepping and not self._stopped:
            self._set_timer(self._loop.time(), self._begin_now)

    def _clock(self) -> float:
        """Return the time up to which steps have been taken; outside of steps, the loop's time."""
        return self._now if self._stepping else max(self._now, self._loop.time())

    def _begin_now(self) -> None:
        self._now = max(self._now, self._loop.time())
        self._begin()

    def _begin(self) -> None:
        """Begin the next steps at `_now`."""
        if self._stopped:
            return
        self._stepping = True
        try:
            step = self.stepper.begin()
        finally:
            self._stepping = False
        self.pages.note(self._cache.pages_in_use, self._now)
        if not step.plan:
            self._compute.rest(self._now)
            due = self.stepper.next_sweep
            self._set_timer(None if due is None else max(due, self._now), self._begin_now)
            return
        chunks = [chunk for _, chunk in step.plan]
        work = step_work(step.plan, self._cache.length)
        remote = self._remote.plan(step.plan) if self._remote is not None else ()
        first_s = self._seconds(work, remote)
        count = self._equal_steps(step, chunks, first_s)
        growth_s = 0.0
        if count > 1:
            last = work._replace(context=work.context + work.decodes * (count - 1))
            growth_s = (self._seconds(last, remote) - first_s) / (count - 1)
        longer_s = self._share_device(remote, count, first_s, growth_s)
        self._row = row = Row(
            step, chunks, self._now, first_s + longer_s, growth_s, count, work, self._factors,
            remote, longer_s,
        )  # fmt: skip
        if count > 1:
            self._shorten(row, min(count, row.ended(self.stepper.sweep_due) + 1))
            self._cache.begin_decodes()
        else:
            self._cache.begin_step(chunks, row.began, row.seconds(1))
        self._wait_for(row)

    def _seconds(self, work: StepWork, remote: Sequence[RemoteWork]) -> float:
        if remote and self._remote is not None:
            return self._remote.seconds(work, remote)
        return self._latency.seconds(work)

    def _share_device(
        self, remote: Sequence[RemoteWork], count: int, first_s: float, growth_s: float
    ) -> float:
        """Begin `count` steps; return by how much each is longer, for debtors of this engine."""
        self._compute.run(self._now)
        longer_s = self._compute.take(count, first_s)
        if remote and self._remote is not None:
            seconds = first_s + growth_s * (count - 1) / 2 + longer_s
            self._remote.serve(remote, seconds, self._now)
        return longer_s

    def _shorten(self, row: Row, count: int) -> None:
        """Let a row have fewer steps."""
        self._compute.put_back(row.longer_s * (row.count - count))
        row.count = count

    def _wait_for(self, row: Row) -> None:
        self._set_timer(row.began + row.seconds(row.count), self._end_all)

    def _set_timer(self, at: float | None, action: Callable[[], object]) -> None:
        """Call `action` at a time, instead of what was to be called; None: never."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if at is None else self._loop.call_at(at, action)

    def _end_all(self) -> None:
        row = self._row
        if row is not None:
            self._end(row, row.count)
            self._take_in()
            self._begin()

    def _take_in(self) -> None:
        """Hand on what was submitted during the row that has ended."""
        for generation in self._submitted:
            self.stepper.submit(generation)
        self._submitted.clear()

    def _end(self, row: Row, count: int) -> None:
        """Let the first `count` steps of the row take effect; `_begin` has to follow.

        Fewer, if there are no pages for all of them: the scheduler makes room for the next one.
        """
        count = self._cache.make_room(row.chunks, count)
        took = row.seconds(count)
        self._now = row.began + took
        self._shorten(row, count)
        if self._remote is not None:
            self._remote.end(row.remote, self._now)
        self._ending = row
        self.busy_s += took
        if self.on_steps is not None:
            self.on_steps(row, count)
        self._row, self._times = None, count
        self._stepping = True
        try:
            self.stepper.end(row.step, row.durations(count))
        finally:
            self._stepping = False
        if self._factors is not None:
            self._factors.pass_over(count)

    def _equal_steps(self, step: PlannedStep, chunks: Sequence[Chunk], seconds: float) -> int:
        """Return how many steps like this one follow each other if nothing comes in between.

        This one takes `seconds`.
        """
        scheduler = self._scheduler
        if (
            self._most == 1
            or seconds <= 0
            # A head that finds no room finds none while nothing ends: decodes only take more.
            or (scheduler.waiting and not scheduler.full and not scheduler.blocked)
            or scheduler.sends
            or len(chunks) < len(scheduler.running)
        ):
            return 1
        least = self._most
        for job, chunk in step.plan:
            if not isinstance(job, Generation) or not job.generated or job.mirror is not None:
                return 1
            # After a preemption, a generation computes its prompt and its output again.
            if not chunk.sample or len(chunk.tokens) > 1 or job.sampling.stop_token_ids:
                return 1
            least = min(least, job.sampling.max_tokens - len(job.tokens) + job.prompt_len)
            if scheduler.is_long(job):  # it asks for room where a page begins
                size = self._cache.page_size
                least = min(least, size - self._cache.length(job.seq_id) % size)
        return least if least > 1 and self._cache.room_for(chunks, least) else 1

    # The runner and the sampling of the stepper

    def run(self, chunks: Sequence[Chunk]) -> None:
        """End the steps that `_begin` has begun. Raises `CreditorFailed`."""
        if self._remote is not None and self._ending is not None:
            try:
                self._remote.check(self._ending.remote)
            except CreditorFailed:
                self._cache.abort_step()
                raise
        self._cache.end_step(chunks, self._times)

    def _sample(self, logits: None, generations: Sequence[Generation]) -> list[Sampled]:
        """Return the next tokens of each generation."""
        states, times, sampled = self._states, self._times, []
        for job in generations:
            state = states.get(job.seq_id)
            if state is None:
                sampling = job.sampling
                state = output_state(job.tokens, job.prompt_len, sampling.seed, sampling.choice)
                states[job.seq_id] = state
            produced = len(job.tokens) - job.prompt_len
            *earlier, last = tokens_from(state, produced, produced + times)
            sampled.append(Sampled(last, earlier=earlier))
        return sampled
