"""The step loop with a real model, cache and puts; a queue receives its outputs."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from time import monotonic

import pytest
import torch
from engine_helpers import generation, make_cache, tiny

from engine.execution.forward.model_runner import ModelRunner
from engine.execution.step_loop import StepLoop
from engine.execution.step_output import StepOutput
from engine.execution.stepper import Stepper
from engine.protocol import Internal, LeaseExpired, MicroserveError
from engine.sampling.sampler import sample
from engine.scheduling.chunk import Chunk
from engine.scheduling.jobs import Generation, Send
from engine.scheduling.scheduler import Scheduler
from kvcache.transport import MemoryNetwork
from kvcache.types import SeqId

PROMPT = [(7 * n) % 250 for n in range(100)]


class Runner(ModelRunner):
    """A model runner that can raise, or wait before a step."""

    failure: BaseException | None = None
    gate: threading.Event | None = None

    def run(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        if self.gate is not None:
            self.gate.wait(20)
        logits = super().run(chunks)
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure
        return logits


class Loop:
    """A step loop with its own cache and scheduler."""

    def __init__(self, network: MemoryNetwork, pages: int, budget: int, name: str) -> None:
        self.cache = make_cache(network, pages, name)
        self.scheduler = Scheduler(self.cache, token_budget=budget, max_batch=16)
        self.runner = Runner(tiny(), self.cache)
        self.outputs: queue.Queue[StepOutput] = queue.Queue()
        self.died = threading.Event()
        stepper = Stepper(self.cache, self.scheduler, self.runner, sample, self._deliver, monotonic)
        self.loop = StepLoop(stepper, self.died.set, compute_threads=1)
        self.loop.start()

    def _deliver(self, outputs: list[StepOutput]) -> None:
        for item in outputs:
            self.outputs.put(item)

    def finish(self, *jobs: Generation) -> None:
        """Wait until all jobs have finished. Raises the first failure."""
        left = set(jobs)
        while left:
            item = self.outputs.get(timeout=20)
            if item.failure is not None:
                raise item.failure
            if item.finish is not None:
                left.discard(item.generation)

    def output(self, *jobs: Generation) -> list[list[int]]:
        for job in jobs:
            self.loop.submit(job)
        self.finish(*jobs)
        return [list(job.output) for job in jobs]

    def at_rest(self) -> None:
        """Wait until all pages are free or cached."""
        give_up = monotonic() + 10
        while monotonic() < give_up:
            use = self.cache.page_use()
            if use.free + use.cached == use.total:
                return
            threading.Event().wait(0.001)
        raise AssertionError(self.cache.page_use())


@pytest.fixture
def new() -> Iterator[Callable[..., Loop]]:
    network, made = MemoryNetwork(), []

    def make(pages: int = 64, budget: int = 64, name: str = "a") -> Loop:
        made.append(Loop(network, pages, budget, name))
        return made[-1]

    yield make
    for loop in made:
        if loop.loop.alive:
            loop.loop.stop()
        loop.cache.check_integrity()
        loop.cache.close()


def job(number: int = 1, prompt: Sequence[int] = PROMPT, **sampling: object) -> Generation:
    return generation(number, prompt, **{"max_tokens": 12, **sampling})  # type: ignore[arg-type]


def send(sender: Loop, receiver: Loop, end: int, *, number: int = 500) -> tuple[Send, str]:
    lease, address = receiver.cache.prep_recv("r", PROMPT, end, 0, 5.0)
    put = sender.cache.open_put(address, PROMPT, 0, end)
    seq_id = SeqId(number)
    cached = min(sender.cache.add_sequence(seq_id, PROMPT), end)
    sender.cache.grow(seq_id, end)
    made = Send("s", seq_id, PROMPT[:end], 0, cached, put, Future(), monotonic(), True)
    return made, lease.lease_id


def test_tokens_do_not_depend_on_batch_budget_or_preemption(new: Callable[..., Loop]):
    prompts = [PROMPT[:n] for n in (100, 3, 37, 64)]
    alone = [new().output(job(prompt=prompt, max_tokens=40))[0] for prompt in prompts]
    jobs = [job(n, prompt, max_tokens=40) for n, prompt in enumerate(prompts)]
    assert new(budget=7).output(*jobs) == alone
    tight = new(pages=12)
    jobs = [job(n, prompt, max_tokens=40) for n, prompt in enumerate(prompts)]
    assert tight.output(*jobs) == alone
    assert tight.scheduler.preemptions > 0
    assert len(set(alone[0])) > 5  # otherwise the comparison proves nothing


def test_sampled_tokens_survive_preemption_too(new: Callable[..., Loop]):
    def jobs() -> list[Generation]:
        return [
            job(n, PROMPT[n : 50 + n], max_tokens=40, temperature=1.0, seed=n) for n in range(3)
        ]

    tight = new(pages=10)
    assert tight.output(*jobs()) == new().output(*jobs())
    assert tight.scheduler.preemptions > 0


def test_a_cached_prefix_changes_nothing(new: Callable[..., Loop]):
    loop = new()
    first, again = job(1), job(2)
    assert loop.output(first) == loop.output(again)
    assert (first.cached, again.cached) == (0, 96)


def test_nothing_follows_an_end(new: Callable[..., Loop]):
    loop = new()
    (tokens,) = loop.output(job(1))
    stops = job(2, stop_token_ids=[tokens[3]])
    loop.loop.submit(stops)
    items = [loop.outputs.get(timeout=20) for _ in range(tokens.index(tokens[3]) + 1)]
    assert [item.finish for item in items] == [None] * (len(items) - 1) + ["stop"]
    loop.at_rest()
    assert loop.outputs.empty()


def test_a_step_that_raises_fails_its_jobs_and_no_others(
    new: Callable[..., Loop], caplog: pytest.LogCaptureFixture
):
    loop = new()
    loop.runner.failure = RuntimeError("boom")
    loop.loop.submit(job(1))
    with pytest.raises(Internal, match="boom"):
        loop.finish(job(1))
    assert loop.loop.stats.failed_steps == 1
    assert "a step failed" in caplog.text
    loop.at_rest()
    assert loop.cache.prefix_tokens == 0  # nothing of the failed step is published
    assert loop.output(job(2)) == new().output(job(1))


def test_a_step_that_raises_fails_its_sends(new: Callable[..., Loop]):
    sender, receiver = new(name="s"), new(name="r")
    sending, lease_id = send(sender, receiver, 80)
    sender.runner.failure = RuntimeError("boom")
    sender.loop.submit(sending)
    with pytest.raises(Internal, match="boom"):
        sending.done.result(10)
    sender.at_rest()
    assert sender.cache.prefix_tokens == 0
    receiver.cache.release(lease_id)  # type: ignore[arg-type]


def test_a_dead_loop_fails_its_jobs_and_refuses_more(
    new: Callable[..., Loop], caplog: pytest.LogCaptureFixture
):
    loop = new()
    loop.scheduler.plan = lambda: 1 / 0  # type: ignore[assignment,method-assign,return-value]
    loop.loop.submit(job(1))
    assert loop.died.wait(10)
    assert not loop.loop.alive
    assert loop.loop.flush().done()  # nobody waits for what will not happen
    with pytest.raises(Internal):
        loop.loop.submit(job(2))
    assert "cannot continue" in caplog.text


def test_an_abort_keeps_the_full_pages(new: Callable[..., Loop]):
    loop = new()
    endless = job(1, max_tokens=4000)
    loop.loop.submit(endless)
    loop.outputs.get(timeout=20)
    loop.loop.abort(endless)
    loop.loop.abort(endless)  # has no effect
    loop.at_rest()
    assert loop.cache.prefix_tokens >= 96


def test_a_send_is_computed_and_lands(new: Callable[..., Loop]):
    sender, receiver = new(name="s", budget=30), new(name="r")
    sending, lease_id = send(sender, receiver, 99)
    sender.loop.submit(sending)
    reply = sending.done.result(10)
    assert (reply.sent_tokens, reply.cached_tokens, reply.computed_tokens) == (99, 0, 99)
    assert reply.bytes == 99 * 2 * sender.cache.layout.token_bytes
    sender.at_rest()
    assert sender.cache.prefix_tokens == 96

    remote = job(7)
    remote.cached = receiver.cache.start_lease(lease_id, remote.seq_id, PROMPT, 99)  # type: ignore[arg-type]
    remote.started = True
    assert receiver.output(remote) == sender.output(job(8))


def test_an_aborted_send_frees_its_pages_after_its_put(new: Callable[..., Loop]):
    sender, receiver = new(name="s"), new(name="r")
    sender.runner.gate = threading.Event()
    sending, lease_id = send(sender, receiver, 99)
    sender.loop.submit(sending)
    sender.loop.abort(sending)
    sender.runner.gate.set()
    with pytest.raises(MicroserveError, match="aborted"):
        sending.done.result(10)
    sender.at_rest()
    receiver.cache.release(lease_id)  # type: ignore[arg-type]


def test_a_refused_send_is_computed_no_further(
    new: Callable[..., Loop], monkeypatch: pytest.MonkeyPatch
):
    """The sender sees in the shared memory that its lease has ended, and stops."""
    monkeypatch.setattr("engine.execution.stepper.SWEEP_S", 0.0)
    sender, receiver = new(name="s", budget=1), new(name="r")
    sending, lease_id = send(sender, receiver, 99)
    receiver.cache.release(lease_id)  # type: ignore[arg-type]
    sender.runner.gate = threading.Event()
    sender.loop.submit(sending)
    while not sending.put.failed:  # the sweep before the first step renews it
        threading.Event().wait(0.001)
    sender.runner.gate.set()
    with pytest.raises(LeaseExpired):
        sending.done.result(20)
    sender.at_rest()
    assert sender.loop.stats.prompt_tokens <= 2


def test_a_queued_send_keeps_its_lease(new: Callable[..., Loop], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("engine.execution.stepper.SWEEP_S", 0.0)
    sender, receiver = new(name="s", budget=1), new(name="r")
    first, _ = send(sender, receiver, 60)
    waiting, lease_id = send(sender, receiver, 60, number=501)
    before = receiver.cache.lease(lease_id).deadline  # type: ignore[arg-type]
    sender.loop.submit(first)
    sender.loop.submit(waiting)
    first.done.result(20)
    assert receiver.cache.lease(lease_id).landed < 60  # type: ignore[arg-type]
    receiver.cache.sweep()
    assert receiver.cache.lease(lease_id).deadline > before  # type: ignore[arg-type]
    waiting.done.result(20)


def test_idle_loops_notice_work_at_once(new: Callable[..., Loop]):
    loop, took = new(), []
    for number in range(3):
        loop.output(job(number, [1, 2], max_tokens=1))
        began = monotonic()
        loop.output(job(10 + number, [1, 2], max_tokens=1))
        took.append(monotonic() - began)
    assert min(took) < 0.4  # well below the sleep of an idle loop; a busy host may hold up some
