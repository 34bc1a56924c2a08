"""The step loop: the thread that runs a `Stepper`, and with it owns the model."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

import torch

from engine.execution.recent_work import RecentWork
from engine.execution.step_output import StepStats
from engine.execution.step_timings import StepTimings
from engine.execution.stepper import Stepper
from engine.protocol import Internal
from engine.scheduling import Generation, Job

__all__ = ["StepLoop"]

log = logging.getLogger(__name__)

MAX_SLEEP_S = 0.5  # of an idle loop; bounds the age of `progress`


class StepLoop:
    """Steps from `start` until `stop`.

    Other threads talk to it through `submit`, `abort`, `advance_mirror` and `flush`, which take
    effect between two steps. It answers through the stepper's `deliver` callback, once a step and
    on its thread, and through the futures of sends, on the threads of their puts.
    """

    def __init__(
        self, stepper: Stepper, died: Callable[[], object], *, compute_threads: int
    ) -> None:
        """`died` is called on the loop's thread if an error ends the loop.

        `compute_threads` is the size of torch's thread team for steps.
        """
        self.stepper = stepper
        self.timings = stepper.timings = StepTimings()
        self.recent = stepper.recent = RecentWork(stepper.clock)
        self.progress = time.monotonic()  # when the latest iteration began
        self._died = died
        self._compute_threads = compute_threads
        self._wake = threading.Event()
        stepper.wake = self._wake.set
        self._ready = threading.Event()  # the size of the thread team is set
        self._stopping = False
        self._dead = False
        self._thread = threading.Thread(target=self._run, name="step-loop", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()
        self._ready.wait()
        # Applies to threads that start from now on: they only copy, and need no thread team.
        torch.set_num_threads(1)

    def stop(self) -> None:
        """End after the current step; unfinished jobs stay unfinished."""
        self._stopping = True
        self._wake.set()
        self._thread.join()

    @property
    def alive(self) -> bool:
        """Whether the loop takes jobs."""
        return self._thread.is_alive() and not self._dead

    @property
    def stats(self) -> StepStats:
        """The stepper's counters."""
        return self.stepper.stats

    def submit(self, job: Job) -> None:
        """Add a job. A send must be `started`: its sequence exists, with pages for all of it.

        Raises `Internal` if the loop has stopped.
        """
        if not self.alive:
            raise Internal("the engine's step loop has stopped")
        self.stepper.submit(job)

    def abort(self, job: Job) -> None:
        """Drop a job; full pages of a generation stay cached. Has no effect on ended jobs."""
        self.stepper.abort(job)

    def advance_mirror(self, generation: Generation) -> None:
        """Advance the mirror of a generation that was set after its submission, from now on."""
        self.stepper.advance_mirror(generation)

    def flush(self) -> Future[None]:
        """Return a future that completes when all earlier calls have taken effect.

        It is complete at once if the loop has stopped.
        """
        if self.alive:
            return self.stepper.flush()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _run(self) -> None:
        try:
            self._loop()
        except Exception:
            log.critical("the step loop cannot continue", exc_info=True)
        finally:
            if not self._stopping:
                self._dead = True  # before the callback: later submissions must fail
                self._died()

    def _loop(self) -> None:
        # A thread's first such call copies the process-wide setting; the second then sets its own.
        torch.get_num_threads()
        torch.set_num_threads(self._compute_threads)
        self._ready.set()
        clock = self.stepper.clock
        while not self._stopping:
            self.progress = time.monotonic()
            self._wake.clear()
            result = self.stepper.step()
            if not result.chunks:
                sleep_s = MAX_SLEEP_S
                if result.next_at is not None:
                    sleep_s = min(max(result.next_at - clock(), 0.0), MAX_SLEEP_S)
                self._wake.wait(sleep_s)
