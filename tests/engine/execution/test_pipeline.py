"""Several steps under way at a time, as an engine of several stages has them."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future

import pytest
from engine_helpers import generation, make_cache

from engine.execution.step_output import StepOutput
from engine.execution.stepper import Stepper
from engine.protocol import BadRequest
from engine.sampling.sampled import Sampled
from engine.scheduling import Chunk, Generation, Scheduler, Send
from engine.scheduling.step_limits import StepLimits
from kvcache.types import SeqId


class Pipeline:
    """A stepper whose runner has up to `depth` steps under way; time passes when one ends."""

    def __init__(
        self,
        depth: int,
        *,
        pages: int = 64,
        budget: int = 64,
        step_pages: int = 0,
        step_samples: int = 0,
    ) -> None:
        self.now = 0.0
        self.cache = make_cache(None, pages)
        store = self.cache.store  # of one step at a time; nothing is computed here
        store.begin = store.end = store.abort = lambda *_step: None
        limits = None
        if step_pages or step_samples:
            limits = StepLimits(self.cache, samples=step_samples or 16, pages=step_pages)
        self.scheduler = Scheduler(
            self.cache, token_budget=budget, max_batch=16, swap=False, depth=depth,
            limits=limits,
        )  # fmt: skip
        self.step_pages, self.step_samples = step_pages, step_samples
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
        """A sequence whose next token is not known yet is in no further step."""
        sampling = {c.seq_id for earlier in self.started for c in earlier if c.sample}
        assert sampling.isdisjoint(chunk.seq_id for chunk in chunks)
        step = self.cache.begin_forward(
            [chunk.seq_id for chunk in chunks], [len(chunk.tokens) for chunk in chunks]
        )
        used = [-(-(span.start + span.count) // 16) for span in step.spans]
        assert not self.step_pages or sum(used) <= self.step_pages
        samples = sum(chunk.sample for chunk in chunks)
        assert not self.step_samples or samples <= self.step_samples + 1
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


@pytest.mark.parametrize("later", ["decodes", "computes its prompt"])
def test_the_last_generation_is_preempted_although_a_step_has_it(later: str):
    """The first one needs a page whenever the other is in a step under way."""
    machine = Pipeline(2, pages=6, budget=16)
    first = generation(1, [1] * 30, max_tokens=60)
    prompt = [2] * 30 if later == "decodes" else [2] * 50
    machine.stepper.submit(first)
    if later != "decodes":
        while first.generated < 2:
            machine.stepper.step()
    machine.stepper.submit(generation(2, prompt, max_tokens=40, priority=1))
    machine.stepper.step()
    while machine.stepper.step().chunks:
        assert first.started or first.generated == 60
    assert machine.scheduler.preemptions
    assert {len(tokens) for tokens in machine.tokens().values()} == {60, 40}
    machine.check()
    machine.cache.transport.close()


def test_sequences_take_turns_where_a_step_has_few_pages():
    """Ten decodes of three pages each, of which two fit a step, and a prompt of five pages."""
    machine = Pipeline(2, step_pages=6)
    for number in range(1, 11):
        machine.stepper.submit(generation(number, [number] * 34, max_tokens=12))
    while len(machine.tokens()) < 10:
        machine.stepper.step()
    machine.stepper.submit(generation(11, [11] * 80, max_tokens=2))
    counts: list[int] = []
    while machine.stepper.step().chunks:
        tokens = machine.tokens()
        counts.append(max(map(len, tokens.values())) - min(map(len, tokens.values())))
        if "r11" in tokens and not counts[-1] > 11:
            prompt_done = len(counts)
    assert {len(tokens) for name, tokens in machine.tokens().items() if name != "r11"} == {12}
    assert len(machine.tokens()["r11"]) == 2
    assert prompt_done < 60  # the prompt did not wait for the decodes' end
    machine.check()
    machine.cache.transport.close()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_step_samples_no_more_than_it_has_rows_for(depth: int):
    """Leases start beyond `max_batch`. All streams go on at the same pace; short prompts join."""
    machine = Pipeline(depth, step_samples=3)
    for number in range(1, 13):
        machine.stepper.submit(generation(number, [number] * 3, max_tokens=30))
    spread = []
    while machine.stepper.step().chunks:
        lengths = [len(tokens) for tokens in machine.tokens().values()]
        if len(lengths) == 12:
            spread.append(max(lengths) - min(lengths))
    assert {len(tokens) for tokens in machine.tokens().values()} == {30}
    assert max(spread) <= 8  # those that began first are a few tokens ahead
    machine.check()
    machine.cache.transport.close()


def test_short_prompts_do_not_starve_a_long_one_where_a_step_has_few_pages():
    machine = Pipeline(2, pages=200, budget=64, step_pages=12)
    for number in range(1, 4):
        machine.stepper.submit(generation(number, [number] * 40, max_tokens=120))
    for _ in range(8):
        machine.stepper.step()
    long = generation(50, [number % 500 for number in range(150)], max_tokens=2)
    machine.stepper.submit(long)
    steps = 0
    while "r50" not in machine.tokens():
        machine.stepper.submit(generation(100 + steps, [steps % 500] * 12, max_tokens=1))
        machine.stepper.step()
        steps += 1
    assert steps < 40
    lengths = [len(machine.tokens()[f"r{number}"]) for number in range(1, 4)]
    assert min(lengths) >= 4  # nor the decodes
    machine.run_until_idle()
    machine.check()
    machine.cache.transport.close()


def test_the_chunks_of_a_prompt_follow_each_other(pipeline):
    """Also of a send; and a second prompt with the same prefix waits until it is shared."""
    prompt = [number % 500 for number in range(600)]
    pipeline.stepper.submit(generation(1, prompt, max_tokens=3))
    pipeline.stepper.step()
    pipeline.stepper.submit(generation(2, [*prompt[:400], 7, 7], max_tokens=3))
    pipeline.run_until_idle()
    both = [one & other for one, other in itertools.pairwise(pipeline.steps)]
    assert sum(bool(each) for each in both) >= 6  # 600 tokens, 64 a step
    assert len(pipeline.steps) <= 10 + 2 + 2 * 2
    assert [len(tokens) for tokens in pipeline.tokens().values()] == [3, 3]
    shared = [job for job in pipeline.outputs if job.generation.request_id == "r2"]
    assert shared[0].generation.cached == 400


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_a_prompt_that_is_aborted_in_several_steps_ends_with_them(pipeline, steps: int):
    job = generation(1, [number % 500 for number in range(700)], max_tokens=3)
    pipeline.stepper.submit(job)
    for _ in range(steps):
        pipeline.stepper.step()
    before = len(pipeline.steps)
    pipeline.stepper.abort(job)
    pipeline.run_until_idle()
    assert len(pipeline.steps) <= before + 1
    assert not pipeline.tokens() and not pipeline.scheduler.running


@pytest.mark.parametrize("failing", [0, 1, 3])
def test_a_step_that_fails_fails_those_that_follow_it(pipeline, caplog, failing: int):
    """What was computed behind the hole is neither counted nor shared."""
    prompt = [number % 500 for number in range(600)]
    pipeline.stepper.submit(generation(1, prompt, max_tokens=3))
    for _ in range(failing):
        pipeline.stepper.step()
    pipeline.fail_next = True
    pipeline.run_until_idle()
    (failure,) = [one.failure for one in pipeline.outputs]
    assert "boom" in str(failure)
    again = generation(2, prompt, max_tokens=3)
    pipeline.stepper.submit(again)
    pipeline.run_until_idle()
    assert len(pipeline.tokens()["r2"]) == 3
    assert again.cached <= 64 * failing


class FailingPut:
    """A put whose receiver's lease has ended, as the sender finds out later."""

    claim, bytes_sent, copy_s, failed = 1, 0, 0.0, False

    def __init__(self) -> None:
        self.write = self.signal = self.renew = self.cancel = lambda *_of: None

    def close(self) -> Future[None]:
        closed: Future[None] = Future()
        if self.failed:
            closed.set_exception(BadRequest("the lease has ended"))
        else:
            closed.set_result(None)
        return closed


def test_a_send_that_fails_in_several_steps_ends_with_them(pipeline):
    """Its pages are freed then, and a stream beside it goes on."""
    pipeline.stepper.submit(generation(1, [1] * 20, max_tokens=40))
    for _ in range(4):
        pipeline.stepper.step()
    prompt = [number % 500 for number in range(700)]
    pipeline.cache.add_sequence(SeqId(9), prompt)
    pipeline.cache.grow(SeqId(9), 700)
    put = FailingPut()
    send = Send("s", SeqId(9), prompt, 0, 0, put, Future(), 0.0, started=True)
    pipeline.stepper.submit(send)
    for _ in range(3):
        pipeline.stepper.step()
    assert pipeline.scheduler.in_flight(send)
    put.failed = True
    pipeline.now += 1  # so that a sweep is due
    pipeline.run_until_idle()
    assert "the lease has ended" in str(send.done.exception())
    assert len(pipeline.tokens()["r1"]) == 40
    assert not pipeline.stepper.stats.failed_steps


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
@pytest.mark.parametrize(("depth", "step_pages"), [(2, 0), (3, 0), (1, 9), (2, 9), (3, 9)])
def test_tokens_are_those_of_one_step_at_a_time(depth: int, step_pages: int, seed: int):
    """With few pages, shared prefixes and preemptions, and where a step has few of the pages."""
    histories = []
    for deep, most in ((1, 0), (depth, step_pages)):
        source = random.Random(seed)
        machine = Pipeline(deep, pages=14, budget=24, step_pages=most)
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
