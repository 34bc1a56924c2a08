"""The step loop: one thread that owns the model and every started sequence.

Other threads talk to it by `submit` and `abort`; both take effect between two steps. It talks back
through one callback a step, with everything that the step drew, and through the futures of sends.
A step that raises fails the jobs that were in it, and the loop lives on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from engine.execution.mirroring import StepMirrors
from engine.execution.model_runner import Chunk
from engine.protocol import Internal, MicroserveError, RemoteSendReply
from engine.sampling.sampler import sample
from engine.scheduling.jobs import Generation, Job, Sampled, Send
from engine.scheduling.parallel_sampling import Forks
from engine.scheduling.scheduler import Scheduler
from kvcache.cache import KVCache

__all__ = ["Draw", "Drawn", "StepLoop", "StepStats"]

log = logging.getLogger(__name__)

SWEEP_S = 0.05  # how often leases are looked at
IDLE_S = 0.5  # the longest sleep of an idle loop
Draw = Callable[[torch.Tensor, Sequence[Generation]], list[Sampled]]


class Runner(Protocol):
    """Computes the KV of a step's chunks."""

    def run(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Returns what a `Draw` draws from: one row for each chunk with `sample`."""
        ...


@dataclass(frozen=True, slots=True)
class Drawn:
    """What one step did for one generation: a token, or an end, or a failure."""

    generation: Generation
    sampled: Sampled | None = None
    finish: Literal["stop", "length"] | None = None
    failure: MicroserveError | None = None


@dataclass(slots=True)
class StepStats:
    """Counters since the start."""

    steps: int = 0
    step_s: float = 0.0
    model_s: float = 0.0
    prompt_tokens: int = 0  # computed for prompts and sends
    generation_tokens: int = 0  # drawn
    expired_leases: int = 0
    failed_steps: int = 0


class StepLoop:
    """Runs until `stop`.

    `deliver` is called on the loop's thread with what a step drew; `died` if the loop cannot go on.
    """

    def __init__(
        self,
        cache: KVCache,
        runner: Runner,
        scheduler: Scheduler,
        deliver: Callable[[list[Drawn]], None],
        died: Callable[[], None],
        *,
        threads: int,
        draw: Draw = sample,
    ) -> None:
        self.stats = StepStats()
        self.forks = Forks(cache, scheduler)
        self.progress = time.monotonic()  # when it last began an iteration
        self._cache = cache
        self._page_size = cache.layout.page_size
        self._runner = runner
        self._scheduler = scheduler
        self._deliver = deliver
        self._died = died
        self._threads = threads
        self._draw = draw
        self._mail: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        scheduler.wake = self._wake.set
        self._counted = threading.Event()  # its threads are set
        self._stopping = False
        self._dead = False
        self._mirrors = StepMirrors()
        self._closing: set[Send] = set()  # puts that have to drain before their pages are let go
        self._thread = threading.Thread(target=self._run, name="step-loop", daemon=True)

    def start(self) -> None:
        self._thread.start()
        self._counted.wait()
        # Of all threads that begin from now on: what they copy is not worth a team of their own.
        torch.set_num_threads(1)

    def stop(self) -> None:
        """End after the step under way; jobs that are not done stay undone."""
        self._stopping = True
        self._wake.set()
        self._thread.join()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._dead

    def submit(self, job: Job) -> None:
        """Take a job on. A send must have its sequence, with pages for all of it (`started`).

        Raises `Internal` if the loop has stopped.
        """
        if not self.alive:
            raise Internal("the engine's step loop has stopped")
        self._post(lambda: self._add(job))

    def mirror(self, generation: Generation) -> None:
        """Move the mirror on that a submitted generation has got since."""
        self._post(lambda: self._mirrors.add(generation))

    def abort(self, job: Job) -> None:
        """Drop a job; full pages of a generation stay cached. Harmless if it has ended already."""
        self._post(lambda: self._abort(job))

    def turn(self) -> Future[None]:
        """Done when all that was asked for before has been done, or the loop has stopped."""
        done: Future[None] = Future()

        def tell() -> None:
            if done.set_running_or_notify_cancel():  # or nobody waits any longer
                done.set_result(None)

        if self.alive:
            self._post(tell)
        else:
            tell()
        return done

    def _post(self, action: Callable[[], None]) -> None:
        self._mail.append(action)
        self._wake.set()

    def _run(self) -> None:
        try:
            self._loop()
        except Exception:
            log.critical("the step loop cannot go on", exc_info=True)
        finally:
            if not self._stopping:
                self._dead = True  # before the callback: what is submitted after it must fail
                self._died()

    def _loop(self) -> None:
        torch.get_num_threads()  # a thread's first such call takes over what others have set
        torch.set_num_threads(self._threads)  # of this thread's parallel regions
        self._counted.set()
        swept = 0.0
        while not self._stopping:
            self.progress = time.monotonic()
            self._wake.clear()
            while self._mail:
                self._mail.popleft()()
            if self.progress - swept > SWEEP_S:
                swept = self.progress
                self.stats.expired_leases += len(self._cache.sweep())
                self._look_after_puts()
                self.forks.sweep()
            if not self._step():
                waiting = self._scheduler.waiting or self.forks.keeping
                busy = waiting or self._cache.leases() or self._closing
                self._wake.wait(SWEEP_S if busy else IDLE_S)

    def _look_after_puts(self) -> None:
        """Keep the leases of those that wait for their turn; give up those that were refused."""
        self._mirrors.renew()
        for send in list(self._scheduler.sends):
            if send.put.failed:
                self._close(send)
            else:
                send.put.renew()

    def _step(self) -> bool:
        """Plan and compute one step; returns whether there was anything to do."""
        began = time.monotonic()
        plan = self._scheduler.plan()
        if not plan:
            return False
        try:
            drawn = self._compute(plan)
            self._scheduler.took(time.monotonic() - began)
        except Exception as error:  # whatever it is, it must not end the loop
            log.exception("a step failed")
            self.stats.failed_steps += 1
            drawn = [self._fail(job, error) for job, _ in plan]
        self.stats.steps += 1
        self.stats.step_s += time.monotonic() - began
        self._deliver([item for item in drawn if item is not None])
        return True

    def _compute(self, plan: Sequence[tuple[Job, Chunk]]) -> list[Drawn | None]:
        began = time.monotonic()
        logits = self._runner.run([chunk for _, chunk in plan])
        self.stats.model_s += time.monotonic() - began
        drawing = [job for job, chunk in plan if isinstance(job, Generation) and chunk.sample]
        for job, chunk in plan:
            if isinstance(job, Send):
                self._finish_if_sent(job)
            self.stats.prompt_tokens += len(chunk.tokens) - chunk.sample
        drawn: list[Drawn | None] = []
        for generation, sampled in zip(drawing, self._draw(logits, drawing), strict=True):
            if sampled.failure is None:
                drawn.append(self._advance(generation, sampled))
            else:
                drawn.append(self._fail(generation, sampled.failure))
        self._mirrors.advance(job for job, _ in plan)
        return drawn

    def _advance(self, generation: Generation, sampled: Sampled) -> Drawn:
        """Append a drawn token, and end the generation if that is the last."""
        first = generation.generated == 0
        if first or (self._cache.kept and len(generation.tokens) % self._page_size == 0):
            self._cache.publish(generation.seq_id, generation.tokens)
        if first:
            self.forks.computed(generation)
        generation.tokens.append(sampled.token)
        generation.generated += 1
        self.stats.generation_tokens += 1
        produced = len(generation.tokens) - generation.prompt_len
        finish: Literal["stop", "length"] | None = None
        matcher = generation.matcher
        if sampled.token in generation.stop_ids or (matcher is not None and matcher.finished):
            finish = "stop"
        elif produced >= generation.sampling.max_tokens:
            finish = "length"
        if finish is not None:
            self._end(generation)
        return Drawn(generation, sampled, finish)

    def _end(self, generation: Generation) -> None:
        self._scheduler.remove(generation)
        self._mirrors.end(generation)
        if generation.started:
            self._cache.publish(generation.seq_id, generation.tokens)
            if not self.forks.keep(generation):
                self._cache.remove_sequence(generation.seq_id)
            generation.started = False
        self.forks.forget(generation)

    def _add(self, job: Job) -> None:
        if isinstance(job, Generation):
            self._mirrors.add(job)
            self.forks.add(job)
        else:
            self._scheduler.add(job)
            self._cache.mark_send(job.seq_id, job.put, job.begin, job.target)
            self._finish_if_sent(job)

    def _abort(self, job: Job) -> None:
        if isinstance(job, Generation):
            self._end(job)
        elif job.started and job not in self._closing:
            job.put.cancel()
            job.failure = Internal("the send was aborted")
            self._close(job)

    def _fail(self, job: Job, error: Exception) -> Drawn | None:
        failure = error if isinstance(error, MicroserveError) else Internal(f"step failed: {error}")
        if isinstance(job, Generation):
            # Its pages may hold half a step: nothing of it is published.
            self._scheduler.remove(job)
            self._mirrors.end(job)
            if job.started:
                self._cache.remove_sequence(job.seq_id)
                job.started = False
            self.forks.forget(job)
            return Drawn(job, failure=failure)
        if job.started and job not in self._closing:
            job.put.cancel()
            job.failure = failure
            self._close(job)
        return None

    def _finish_if_sent(self, send: Send) -> None:
        if send not in self._closing and self._cache.length(send.seq_id) >= send.target:
            self._close(send)

    def _close(self, send: Send) -> None:
        """No more of this send is computed; its pages go when the last put has drained."""
        self._scheduler.remove(send)
        self._closing.add(send)
        send.computed_at = time.monotonic()
        self._cache.clear_mark(send.seq_id)
        send.put.close().add_done_callback(
            lambda closed: self._post(lambda: self._drained(send, closed.exception()))
        )

    def _drained(self, send: Send, error: BaseException | None) -> None:
        failure = send.failure or error
        if failure is None:
            self._cache.publish(send.seq_id, send.tokens)
        self._cache.remove_sequence(send.seq_id)
        send.started = False
        self._closing.discard(send)
        if failure is not None:
            send.done.set_exception(failure)
            return
        sent_cached = max(min(send.cached, send.target) - send.begin, 0)
        now = time.monotonic()
        send.done.set_result(
            RemoteSendReply(
                sent_tokens=send.target - send.begin,
                cached_tokens=sent_cached,
                computed_tokens=send.target - send.cached,
                bytes=send.put.bytes_sent,
                ms=(now - send.arrived) * 1000,
                put_ms=(now - send.computed_at) * 1000,
            )
        )
