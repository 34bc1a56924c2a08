"""The stepper: one step of the engine after another, without a thread and without a wall clock.

A step plans chunks, computes them, samples, delivers and sweeps. Time comes from an injected clock,
and the model stays behind a `Runner` and a sampling function, so the same code serves requests on a
thread (`engine.execution.step_loop`) and runs in virtual time. Imports no torch.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from engine.execution.closing_sends import ClosingSends
from engine.execution.lost_blocks import LostBlocks
from engine.execution.recent_work import RecentPut, RecentWork
from engine.execution.runner import DeviceLost, Runner, StepCache
from engine.execution.step_mirrors import StepMirrors
from engine.execution.step_output import PlannedStep, StepOutput, StepResult, StepStats
from engine.execution.step_timings import StepTimings
from engine.protocol import Internal, MicroserveError, NoCapacity
from engine.scheduling import Chunk, Generation, Job, ParallelSampling, Scheduler, Send

if TYPE_CHECKING:
    from engine.sampling.sampled import Sampled

__all__ = ["Stepper"]

log = logging.getLogger(__name__)

SWEEP_S = 0.05
# Sweeps during which the head of the queue may find no room while nothing else runs: ten seconds,
# in which this process was not stopped.
STUCK_SWEEPS = 200
Logits = TypeVar("Logits")


class Stepper:
    """Turns jobs into steps.

    `submit`, `abort`, `advance_mirror` and `flush` may be called on any thread; they take effect at
    the beginning of the next `step`. All other calls belong to the thread that steps.
    """

    def __init__(
        self,
        cache: StepCache,
        scheduler: Scheduler,
        runner: Runner[Logits],
        sample: Callable[[Logits, Sequence[Generation]], list[Sampled]],
        deliver: Callable[[list[StepOutput]], object],
        clock: Callable[[], float],
        *,
        start: Callable[[Sequence[Chunk]], object] | None = None,
    ) -> None:
        """`sample` takes the runner's logits and the generations of their rows.

        As many steps as the scheduler's `depth` are under way at a time. With `start`, that begins
        one, and the runner's `run` ends the one that began first; if `start` fails, `run` raises
        why.

        `deliver` receives the outputs of each step. `clock` returns monotonic seconds, on any
        thread: the call of a send is completed where its put has drained.
        """
        self.stats = StepStats()
        self.timings: StepTimings | None = None  # where to note the durations of steps and puts
        self.recent: RecentWork | None = None  # where to note steps and puts with their times
        self.parallel_sampling = ParallelSampling(cache, scheduler, clock)
        # Called on any thread when `step` has something new to do.
        self.wake: Callable[[], object] = lambda: None
        scheduler.wake = lambda: self.wake()
        self.clock = clock
        self.sweep_s = SWEEP_S  # how often leases, puts and retained sequences are checked
        self._cache = cache
        self._page_size = cache.page_size
        self._scheduler = scheduler
        self._runner: Runner[Any] = runner
        self._sample: Callable[[Any, Sequence[Generation]], list[Sampled]] = sample
        self._deliver = deliver
        self._start = start
        self._in_flight: deque[PlannedStep] = deque()  # steps that have been started
        self._deferred: list[Callable[[], object]] = []  # until a step has ended
        self._failing: dict[Job, Exception] = {}  # when the last step with the job has ended
        self._inbox: deque[Callable[[], object]] = deque()
        self._mirrors = StepMirrors()
        self._lost_blocks = LostBlocks(cache, self.stats)
        self._closing = ClosingSends(cache, clock, self._post, self._sent)
        self._swept = clock()
        self._stuck: Generation | None = None  # `Scheduler.stuck` in the latest sweep
        self._stuck_sweeps = 0  # how often in a row it was

    # On any thread

    def submit(self, job: Job) -> None:
        """Add a job. A send must be `started`: its sequence exists, with pages for all of it."""
        self._post(partial(self._add, job))

    def abort(self, job: Job) -> None:
        """Drop a job; full pages of a generation stay cached. Has no effect on ended jobs.

        A send writes nothing further from now on, also during a step.
        """
        if isinstance(job, Send):
            # The failure comes first: without it, a cancelled put would look like a complete one.
            job.failure = job.failure or Internal("the send was aborted")
            job.put.cancel()
        self._post(partial(self._abort, job))

    def advance_mirror(self, generation: Generation) -> None:
        """Advance the mirror of a generation that was set after its submission, from now on."""
        self._post(partial(self._mirrors.add, generation))

    def flush(self) -> Future[None]:
        """Return a future that completes when all earlier calls have taken effect."""
        done: Future[None] = Future()

        def complete() -> None:
            if done.set_running_or_notify_cancel():
                done.set_result(None)

        self._post(complete)
        return done

    def _post(self, action: Callable[[], object]) -> None:
        self._inbox.append(action)
        self.wake()

    # On the thread that steps

    def step(self) -> StepResult:
        """Take the calls that have come in, sweep if it is time, and compute one step.

        Where several steps are under way, further ones are started first, and the oldest ends. An
        exception of the runner or of sampling fails the jobs of the step and nothing else; any
        other exception means that the stepper cannot continue.
        """
        while len(self._in_flight) < self._scheduler.depth and (step := self.begin()).plan:
            if self._start is not None:
                self._start([chunk for _, chunk in step.plan])
            self._in_flight.append(step)
        if not self._in_flight:
            return StepResult(0, (), self.next_sweep)
        step = self._in_flight.popleft()
        outputs = self.end(step)
        return StepResult(len(step.plan), outputs, self.clock())

    def begin(self) -> PlannedStep:
        """Take the calls that have come in, sweep if it is time, and plan a step.

        The plan is empty if there is nothing to compute. Otherwise `end` has to follow; calls that
        come in meanwhile wait for the next `begin`.
        """
        while self._inbox:
            self._inbox.popleft()()
        began = self.clock()
        if began >= self.sweep_due:
            self._swept = began
            self._sweep()
        self._lost_blocks.take()
        return PlannedStep(self._scheduler.plan(), began, self._scheduler.planned)

    def end(self, step: PlannedStep, durations: Sequence[float] = ()) -> list[StepOutput]:
        """Compute a planned step and deliver its outputs, which are returned.

        With `durations` (seconds), the runner and sampling do the work of so many equal steps at
        once, of which only the last may end a generation; otherwise of one, measured by the clock.
        """
        outputs = self._run(step, durations)
        self._deliver(outputs)
        deferred, self._deferred = self._deferred, []
        for action in deferred:
            action()
        return outputs

    @property
    def sweep_due(self) -> float:
        """The time from which on a step begins with a sweep, by the clock."""
        return self._swept + self.sweep_s

    @property
    def next_sweep(self) -> float | None:
        """When a sweep is due, by the clock; None if there is nothing to sweep."""
        waiting = self._scheduler.waits_for_room or self.parallel_sampling.retaining
        if waiting or self._closing or self._cache.leases():
            return self.sweep_due
        return None

    def _sweep(self) -> None:
        """Check leases, puts and retained sequences."""
        self.stats.expired_leases += len(self._cache.sweep())
        self._mirrors.renew()
        for send in list(self._scheduler.sends):
            if send.put.failed:
                self._close_failed(send)
            else:  # a waiting send must not lose its lease
                send.put.renew()
        self.parallel_sampling.sweep()
        self._scheduler.sweep()
        self._end_stuck()

    def _end_stuck(self) -> None:
        """End a wait for room that nothing here will make: other generations wait behind it."""
        job = self._scheduler.stuck
        self._stuck_sweeps = self._stuck_sweeps + 1 if job is self._stuck else 0
        self._stuck = job
        if job is None or self._stuck_sweeps < STUCK_SWEEPS:
            return
        self._stuck = None
        if self._scheduler.drop_swap(job):
            return  # as a prompt, it shares the pages of its cached prefix
        held = "leases, pins or quarantine hold the pages"
        if job.started:
            held = "no engine lends any further pages"
        failure = NoCapacity(f"no room for {job.target} tokens: {held}")
        self._deliver([self._fail_generation(job, failure)])

    def _run(self, step: PlannedStep, durations: Sequence[float]) -> list[StepOutput]:
        """Compute a step, or equal ones; if that fails, fail its jobs."""
        plan, began = step.plan, step.began
        outputs: list[StepOutput | None]
        timings = self.timings
        try:
            work = timings.work_of(plan, self._cache.length) if timings is not None else None
            outputs = self._compute(plan)
            self._scheduler.record_steps(durations or (self.clock() - began,), step.counts)
            if timings is not None and work is not None:
                timings.add_step(work, self.clock() - began)
            if self.recent is not None:
                self.recent.add_step(plan, began, self.clock() - began, step.counts)
        except DeviceLost:
            raise
        except Exception as error:  # must not end the stepper, whatever else it is
            outputs = []
            if not self._lost_blocks.recover(error):
                log.exception("a step failed")
                self.stats.failed_steps += 1
                outputs += [self._fail(job, error) for job, _ in plan]
        for job in [job for job in self._failing if not self._scheduler.in_flight(job)]:
            outputs.append(self._fail(job, self._failing.pop(job)))
        self.stats.steps += len(durations) or 1
        self.stats.step_s += self.clock() - began
        return [output for output in outputs if output is not None]

    def _compute(self, plan: Sequence[tuple[Job, Chunk]]) -> list[StepOutput | None]:
        began = self.clock()
        try:
            logits = self._runner.run([chunk for _, chunk in plan])
        finally:
            self._scheduler.ended(plan)
        self.stats.model_s += self.clock() - began
        sampling: list[Generation] = []
        computed = 0
        for job, chunk in plan:
            computed += len(chunk.tokens)
            if isinstance(job, Send):
                self._close_if_computed(job)
            elif chunk.sample:
                sampling.append(job)
        self.stats.prompt_tokens += computed - len(sampling)
        outputs: list[StepOutput | None] = []
        for generation, sampled in zip(sampling, self._sample(logits, sampling), strict=True):
            if generation in self._failing:
                continue  # an earlier step failed, so this one computed nothing
            if sampled.failure is None:
                outputs.append(self._append(generation, sampled))
            else:
                outputs.append(self._fail_generation(generation, sampled.failure))
        self._mirrors.advance(job for job, _ in plan)
        return outputs

    def _append(self, generation: Generation, sampled: Sampled) -> StepOutput:
        """Append a sampled token, and end the generation if it is the last one."""
        first = generation.generated == 0
        if first or (self._cache.persistent and len(generation.tokens) % self._page_size == 0):
            self._cache.publish(generation.seq_id, generation.tokens)
            self._scheduler.published(generation)
        if first:
            self.parallel_sampling.prompt_computed(generation)
        tokens, count = generation.tokens, 1
        if sampled.earlier:
            tokens += sampled.earlier
            count += len(sampled.earlier)
        tokens.append(sampled.token)
        generation.generated += count
        self.stats.generation_tokens += count
        produced = len(tokens) - generation.prompt_len
        finish: Literal["stop", "length"] | None = None
        matcher = generation.matcher
        if sampled.token in generation.stop_ids or (matcher is not None and matcher.finished):
            finish = "stop"
        elif produced >= generation.sampling.max_tokens:
            finish = "length"
        if finish is not None:
            self._end(generation)
        return StepOutput(generation, sampled, finish)

    def _add(self, job: Job) -> None:
        if isinstance(job, Generation):
            self._mirrors.add(job)
            self.parallel_sampling.add(job)
        else:
            self._scheduler.add(job)
            self._cache.mark_send(job.seq_id, job.put, job.begin, job.target)
            self._close_if_computed(job)

    def _abort(self, job: Job) -> None:
        if self._deferred_until_out(job, partial(self._abort, job)):
            return
        if isinstance(job, Generation):
            self._end(job)
        else:
            self._fail_send(job, Internal("the send was aborted"))

    def _deferred_until_out(self, job: Job, action: Callable[[], object]) -> bool:
        """Have `action` called once no step under way has the job; return False if none has.

        No further step gets it.
        """
        if not self._scheduler.in_flight(job):
            return False
        self._scheduler.hold(job)
        self._deferred.append(action)
        return True

    def _end(self, generation: Generation) -> None:
        self._scheduler.remove(generation)
        self._mirrors.end(generation)
        if generation.started:
            self._cache.publish(generation.seq_id, generation.tokens)
            if not self.parallel_sampling.retain(generation):
                self._cache.remove_sequence(generation.seq_id)
            generation.started = False
        self.parallel_sampling.forget(generation)

    def _fail(self, job: Job, error: Exception) -> StepOutput | None:
        failure = error if isinstance(error, MicroserveError) else Internal(f"step failed: {error}")
        if self._scheduler.in_flight(job):  # later steps, which follow what is missing now
            self._failing.setdefault(job, failure)
            self._scheduler.hold(job)
            if isinstance(job, Send):
                job.failure = job.failure or failure
                job.put.cancel()
            return None
        if isinstance(job, Send):
            self._fail_send(job, failure)
            return None
        return self._fail_generation(job, failure)

    def _fail_generation(self, job: Generation, failure: MicroserveError) -> StepOutput:
        # Its pages may hold half a step, so none of them is published.
        self._scheduler.remove(job)
        self._mirrors.end(job)
        if job.started:
            self._cache.remove_sequence(job.seq_id)
            job.started = False
        self.parallel_sampling.forget(job)
        return StepOutput(job, failure=failure)

    def _fail_send(self, send: Send, failure: MicroserveError) -> None:
        if not send.started:
            return
        send.failure = send.failure or failure
        send.put.cancel()  # also if it is closing: its writes may take long
        if send not in self._closing:
            self._close(send)

    def _close_if_computed(self, send: Send) -> None:
        if send not in self._closing and self._cache.length(send.seq_id) >= send.target:
            self._close(send)

    def _close_failed(self, send: Send) -> None:
        """Close a send whose put has failed, once no step under way has it."""
        deferred = self._deferred_until_out(send, partial(self._close_failed, send))
        if not deferred and send in self._scheduler.sends:
            self._close(send)

    def _close(self, send: Send) -> None:
        """Compute no more of a send; its pages are freed when its last write has drained."""
        self._scheduler.remove(send)
        self._closing.close(send)

    def _sent(self, send: Send, now: float) -> None:
        """Note the put of a send that has succeeded. On any thread, under the cache's lock."""
        put = send.put
        if self.timings is not None:
            self.timings.add_put(put.bytes_sent, put.copy_s)
        if self.recent is not None and put.began:
            seconds = max(now - put.began, 0.0)
            self.recent.add_put(
                RecentPut(put.began, seconds, put.copy_s, put.bytes_sent, send.request_id)
            )
