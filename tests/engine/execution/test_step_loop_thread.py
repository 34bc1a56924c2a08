"""The thread of the step loop, over steps that the test makes up."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from itertools import pairwise
from time import monotonic
from typing import Any, cast

import pytest
import torch
from engine_helpers import generation

from engine.execution.step_loop import StepLoop
from engine.execution.step_output import StepResult, StepStats
from engine.execution.stepper import Stepper
from engine.protocol import Internal

NOW = 100.0
IDLE, BUSY = StepResult(0, (), None), StepResult(1, (), NOW)
Step = Callable[[], StepResult] | StepResult


class Loop:
    """A step loop, and the stepper that it runs. An idle loop notes its wait and goes on at once.

    After its last step the stepper waits for `stop`.
    """

    def __init__(self, *steps: Step, compute_threads: int = 1) -> None:
        self.stats = StepStats()
        self.wake: Callable[[], object] = lambda: None
        self.calls: list[tuple[Any, ...]] = []
        self.waits: list[tuple[float, bool]] = []  # seconds, and whether a call had come in
        self.ended = threading.Event()
        self.deaths: list[bool] = []  # whether the loop still said that it was alive
        self.flushed: Future[None] = Future()
        self._steps = deque(steps)
        self.loop = StepLoop(cast(Stepper, self), self._die, compute_threads=compute_threads)
        event = self.loop._wake
        self._wait_for_stop = event.wait
        event.wait = lambda seconds: self.waits.append((seconds, event.is_set()))  # type: ignore

    def run(self) -> Loop:
        self.loop.start()
        assert self.ended.wait(20)
        return self

    def step(self) -> StepResult:
        if not self._steps:
            self.ended.set()
            self._wait_for_stop(20)
            return BUSY
        step = self._steps.popleft()
        return step() if callable(step) else step

    def clock(self) -> float:
        return NOW

    def submit(self, job: object) -> None:
        self.calls.append(("submit", job))

    def abort(self, job: object) -> None:
        self.calls.append(("abort", job))

    def advance_mirror(self, job: object) -> None:
        self.calls.append(("advance_mirror", job))

    def flush(self) -> Future[None]:
        return self.flushed

    def _die(self) -> None:
        self.deaths.append(self.loop.alive)
        self.ended.set()


@pytest.fixture
def threads() -> Iterator[None]:
    """Let this process have two threads a team, and restore their number."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def new(threads: None) -> Iterator[Callable[..., Loop]]:
    made: list[Loop] = []

    def make(*steps: Step, **options: int) -> Loop:
        made.append(Loop(*steps, **options))
        return made[-1]

    yield make
    for each in made:
        if each.loop.alive:
            each.loop.stop()


def test_an_idle_loop_sleeps_until_the_next_sweep_but_half_a_second_at_most(
    new: Callable[..., Loop],
):
    due = (None, NOW + 0.25, NOW - 1.0, NOW, NOW + 7.0)
    loop = new(*(StepResult(0, (), at) for at in due), BUSY, BUSY).run()
    assert [seconds for seconds, _ in loop.waits] == [0.5, 0.25, 0.0, 0.0, 0.5]


def test_a_call_that_comes_in_during_a_step_cuts_the_next_sleep_short(new: Callable[..., Loop]):
    def step() -> StepResult:
        loop.wake()
        return IDLE

    loop = new(IDLE, step, IDLE)
    loop.run()
    assert [woken for _, woken in loop.waits] == [False, True, False]


def test_progress_is_the_beginning_of_the_latest_iteration(new: Callable[..., Loop]):
    seen: list[tuple[float, float]] = []

    def step() -> StepResult:
        seen.append((loop.loop.progress, monotonic()))
        return IDLE

    before = monotonic()
    loop = new(step, step, step)
    assert loop.loop.progress >= before
    loop.run()
    for (_, earlier), (progress, now) in pairwise(seen):
        assert earlier <= progress <= now


def test_only_the_loop_computes_with_a_team_of_threads(new: Callable[..., Loop]):
    started, seen = threading.Event(), []

    def step() -> StepResult:
        assert started.wait(20)
        seen.append((torch.get_num_threads(), threading.current_thread().daemon))
        return IDLE

    loop = new(step, compute_threads=3)
    loop.loop.start()
    assert torch.get_num_threads() == 1
    started.set()
    assert loop.ended.wait(20)
    assert seen == [(3, True)]  # a process can end during a step


def test_the_loop_sets_its_threads_before_the_process_does(
    new: Callable[..., Loop], monkeypatch: pytest.MonkeyPatch
):
    """Otherwise the loop's number would be that of later threads."""
    order, too_early = [], threading.Event()

    def set_threads(count: int) -> None:
        if count == 3:
            too_early.wait(0.05)
        else:
            too_early.set()
        order.append(count)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "set_num_threads", set_threads)
        new(compute_threads=3).run()
    assert order == [3, 1]


def test_an_error_ends_the_loop_and_is_told_once(
    new: Callable[..., Loop], caplog: pytest.LogCaptureFixture
):
    def fail() -> StepResult:
        raise RuntimeError("boom")

    loop = new(IDLE, fail, IDLE).run()
    assert loop.deaths == [False]
    assert not loop.loop.alive
    assert "cannot continue" in caplog.text and "boom" in caplog.text
    with pytest.raises(Internal, match="stopped"):
        loop.loop.submit(generation(1, [1]))
    assert loop.loop.flush().result(0) is None
    assert loop.calls == []


def test_a_stopped_loop_has_not_died(new: Callable[..., Loop]):
    loop = new().run()
    assert loop.loop.alive
    loop.loop.stop()
    assert not loop.loop.alive and loop.deaths == []
    with pytest.raises(Internal, match="stopped"):
        loop.loop.submit(generation(1, [1]))
    assert loop.loop.flush().result(0) is None


def test_a_loop_that_has_not_started_takes_no_jobs(new: Callable[..., Loop]):
    loop = new()
    assert not loop.loop.alive
    with pytest.raises(Internal):
        loop.loop.submit(generation(1, [1]))


def test_calls_reach_the_stepper(new: Callable[..., Loop]):
    loop, job = new().run(), generation(1, [1])
    loop.loop.submit(job)
    loop.loop.advance_mirror(job)
    loop.loop.abort(job)
    assert loop.calls == [("submit", job), ("advance_mirror", job), ("abort", job)]
    assert loop.loop.flush() is loop.flushed
    assert loop.loop.stats is loop.stats
