"""Several steps under way at a time, as an engine of several stages has them."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Iterator, Sequence

import pytest
from engine_helpers import generation, make_cache

from engine.execution.step_output import StepOutput
from engine.execution.stepper import Stepper
from engine.sampling.sampled import Sampled
from engine.scheduling import Chunk, Generation, Scheduler


class Pipeline:
    """A stepper whose runner has up to `depth` steps under way; time passes when one ends."""

    def __init__(self, depth: int, *, pages: int = 64, budget: int = 64) -> None:
        self.now = 0.0
        self.cache = make_cache(None, pages)
        store = self.cache.store  # of one step at a time; nothing is computed here
        store.begin = store.end = store.abort = lambda *_step: None
        self.scheduler = Scheduler(
            self.cache, token_budget=budget, max_batch=16, swap=False, depth=depth
        )
        self.stepper = Stepper(
            self.cache, self.scheduler, self, self.sample, self.deliver, lambda: self.now,
            start=self.start,
        )  # fmt: skip
        self.started: deque[Sequence[Chunk]] = deque()
        self.steps: list[set[int]] = []  # sequences of each step
        self.most = 0  # steps under way
        self.fail_next = False
        self.outputs: list[StepOutput] = []

    def start(self, chunks: Sequence[Chunk]) -> None:
        busy = {chunk.seq_id for earlier in self.started for chunk in earlier}
        assert busy.isdisjoint(chunk.seq_id for chunk in chunks)
        self.cache.begin_forward(
            [chunk.seq_id for chunk in chunks], [len(chunk.tokens) for chunk in chunks]
        )
        self.started.append(chunks)
        self.steps.append({int(chunk.seq_id) for chunk in chunks})
        self.most = max(self.most, len(self.started))

    def run(self, chunks: Sequence[Chunk]) -> None:
        assert self.started.popleft() == chunks
        self.now += 0.01
        if self.fail_next:
            self.fail_next = False
            self.cache.abort_forward()
            raise RuntimeError("boom")
        self.cache.end_forward()

    def sample(self, logits: None, generations: Sequence[Generation]) -> list[Sampled]:
        return [Sampled(sum(one.tokens) % 512) for one in generations]

    def deliver(self, outputs: list[StepOutput]) -> None:
        self.outputs += outputs

    def tokens(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for output in self.outputs:
            if output.sampled is not None:
                found.setdefault(output.generation.request_id, []).append(output.sampled.token)
        return found

    def run_until_idle(self) -> None:
        while self.stepper.step().chunks:
            pass

    def check(self) -> None:
        self.cache.check_integrity()
        use = self.cache.page_use()
        assert use.free + use.cached == use.total
        assert not self.started


@pytest.fixture
def pipeline() -> Iterator[Pipeline]:
    made = Pipeline(2)
    yield made
    made.check()
    made.cache.transport.close()


def test_decodes_are_divided_among_the_steps(pipeline):
    for number in range(1, 9):
        pipeline.stepper.submit(generation(number, [number] * 5, max_tokens=20))
    pipeline.run_until_idle()
    assert pipeline.most == 2
    middle = pipeline.steps[8:24]
    assert all(len(step) == 4 for step in middle)
    assert all(one.isdisjoint(other) for one, other in itertools.pairwise(middle))
    assert {len(tokens) for tokens in pipeline.tokens().values()} == {20}


def test_a_single_generation_has_one_step_under_way(pipeline):
    pipeline.stepper.submit(generation(1, [1] * 5, max_tokens=6))
    pipeline.run_until_idle()
    assert pipeline.most == 1 and len(pipeline.tokens()["r1"]) == 6


def test_a_generation_is_aborted_when_its_step_has_ended(pipeline):
    jobs = [generation(number, [number] * 40, max_tokens=50) for number in (1, 2)]
    for job in jobs:
        pipeline.stepper.submit(job)
    for _ in range(6):
        pipeline.stepper.step()
    assert any(pipeline.scheduler.in_flight(job) for job in jobs)
    for job in jobs:
        pipeline.stepper.abort(job)
    pipeline.run_until_idle()
    assert not pipeline.scheduler.running
    assert all(len(tokens) < 12 for tokens in pipeline.tokens().values())


def test_a_step_that_fails_fails_its_own_jobs(pipeline, caplog):
    for number in range(1, 5):
        pipeline.stepper.submit(generation(number, [number] * 5, max_tokens=12))
    for _ in range(5):
        pipeline.stepper.step()
    pipeline.fail_next = True
    pipeline.run_until_idle()
    failed = [one.generation.request_id for one in pipeline.outputs if one.failure is not None]
    assert len(failed) == 2
    others = {"r1", "r2", "r3", "r4"} - set(failed)
    assert {len(pipeline.tokens()[name]) for name in others} == {12}


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("depth", [2, 3])
def test_tokens_are_those_of_one_step_at_a_time(depth: int, seed: int):
    """With few pages, shared prefixes, preemptions and aborts at random."""
    histories = []
    for deep in (1, depth):
        source = random.Random(seed)
        machine = Pipeline(deep, pages=14, budget=24)
        shared = [source.randrange(500) for _ in range(40)]
        jobs = []
        for number in range(1, 13):
            prompt = shared[: source.randrange(41)] + [
                source.randrange(500) for _ in range(source.randrange(1, 60))
            ]
            jobs.append(generation(number, prompt, max_tokens=source.randrange(1, 40)))
            machine.stepper.submit(jobs[-1])
            for _ in range(source.randrange(4)):
                machine.stepper.step()
        machine.run_until_idle()
        assert machine.most <= deep
        machine.check()
        histories.append(machine.tokens())
    assert histories[0] == histories[1]
    assert len(histories[0]) == 12
