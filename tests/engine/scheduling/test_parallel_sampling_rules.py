"""Which choices fork from which prompts, and how long a prompt is retained; without an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
from engine_helpers import generation, make_cache
from scheduler_steps import step

from engine.scheduling.jobs import Generation
from engine.scheduling.parallel_sampling import ParallelSampling
from engine.scheduling.scheduler import Scheduler

PROMPT = list(range(70))  # four pages and six tokens


class Choices:
    """Parallel sampling with a cache, a scheduler and a clock, but without a stepper."""

    def __init__(self, pages: int = 64, max_batch: int = 8) -> None:
        self.now = 0.0
        self.cache = make_cache(pages=pages)
        self.scheduler = Scheduler(self.cache, token_budget=64, max_batch=max_batch)
        self.sampling = ParallelSampling(self.cache, self.scheduler, lambda: self.now)

    def parent(self, forks: int = 1, name: str = "parent", number: int = 1) -> Generation:
        job = generation(number, PROMPT)
        job.request_id, job.forks = name, forks
        self.sampling.add(job)
        return job

    def child(self, number: int, tokens: Sequence[int] = PROMPT, of: str = "parent") -> Generation:
        job = generation(number, tokens)
        job.fork_of = of
        self.sampling.add(job)
        return job

    def compute(self, job: Generation) -> None:
        """Compute a prompt, and everything else meanwhile; tell of its first token."""
        while job.target == job.prompt_len:
            assert step(self.scheduler, self.cache)
        self.sampling.prompt_computed(job)
        job.generated = 1

    def computed(self, job: Generation) -> Generation:
        self.compute(job)
        return job

    def end(self, job: Generation) -> None:
        """End a generation as the stepper does."""
        self.scheduler.remove(job)
        if job.started:
            if not self.sampling.retain(job):
                self.cache.remove_sequence(job.seq_id)
            job.started = False
        self.sampling.forget(job)

    @property
    def active(self) -> int:
        """Pages of sequences."""
        return self.cache.page_use().active


@pytest.fixture
def new() -> Iterator[Callable[..., Choices]]:
    made: list[Choices] = []

    def make(**options: int) -> Choices:
        made.append(Choices(**options))
        return made[-1]

    yield make
    for each in made:
        each.cache.check_integrity()
        each.cache.close()


def forked(job: Generation) -> bool:
    return job.started and job.begin == job.cached == min(len(PROMPT), job.prompt_len - 1)


def test_children_wait_for_the_prompt_and_fork_then(new: Callable[..., Choices]):
    choices = new()
    parent = choices.parent(forks=3)
    children = [choices.child(2), choices.child(3)]
    assert choices.sampling.waiting == 2 and not choices.sampling.retaining
    assert choices.scheduler.waiting == [parent]
    choices.compute(parent)
    assert choices.sampling.waiting == 0
    assert choices.scheduler.running == [parent, *children] and all(map(forked, children))
    late = choices.child(4)
    assert forked(late) and choices.scheduler.running[-1] is late
    for job in (parent, *children, late):
        choices.end(job)
    assert choices.active == 0 and not choices.sampling.retaining


@pytest.mark.parametrize(
    ("tokens", "begin"),
    [
        (PROMPT[:30], 29),  # its last token has to be computed
        (PROMPT[:69], 68),
        ([*PROMPT, 1, 2], 70),  # has earlier output
        ([*PROMPT[:60], *range(500, 520)], None),
        ([500, *PROMPT[1:]], None),
        ([*PROMPT[:69], 500], 69),  # its last token differs
    ],
)
def test_a_child_shares_no_more_than_the_parents_prompt(
    new: Callable[..., Choices], tokens: list[int], begin: int | None
):
    choices = new()
    choices.computed(choices.parent())
    child = choices.child(2, tokens)
    assert (child.started, child.begin) == (begin is not None, begin)
    assert child in (choices.scheduler.waiting if begin is None else choices.scheduler.running)
    if begin is not None:
        assert choices.cache.length(child.seq_id) == child.cached == begin


def test_children_without_a_parent_are_ordinary_generations(new: Callable[..., Choices]):
    choices = new()
    stranger = choices.child(2)
    itself = generation(3, PROMPT)
    itself.request_id = itself.fork_of = "itself"
    itself.forks = 1
    choices.sampling.add(itself)
    assert choices.scheduler.waiting == [stranger, itself]
    assert choices.sampling.waiting == 0


def test_a_prompt_is_retained_for_five_seconds(new: Callable[..., Choices]):
    choices = new()
    choices.now = 7.0
    choices.end(choices.computed(choices.parent()))
    assert choices.sampling.retaining and choices.active == 5
    choices.now = 12.0
    choices.sampling.sweep()
    assert choices.sampling.retaining and choices.active == 5
    choices.now = 12.001
    choices.sampling.sweep()
    assert not choices.sampling.retaining and choices.active == 0
    choices.sampling.sweep()
    late = choices.child(2)
    assert not late.started and choices.scheduler.waiting == [late]


def test_a_prompt_is_retained_until_its_last_announced_child(new: Callable[..., Choices]):
    choices = new()
    parent = choices.parent(forks=3)
    waiting = choices.child(2)
    choices.end(choices.computed(parent))
    assert forked(waiting) and choices.sampling.retaining
    second = choices.child(3)
    assert forked(second) and choices.sampling.retaining
    third = choices.child(4)
    assert forked(third) and not choices.sampling.retaining
    fourth = choices.child(5)  # was not announced
    assert not fourth.started
    for job in (waiting, second, third):
        choices.end(job)
    assert choices.active == 0


def test_more_children_than_announced_fork_while_the_parent_runs(new: Callable[..., Choices]):
    choices = new()
    parent = choices.computed(choices.parent(forks=1))
    children = [choices.child(number) for number in (2, 3)]
    assert all(map(forked, children))
    choices.end(parent)
    assert not choices.sampling.retaining
    for job in children:
        choices.end(job)
    assert choices.active == 0


@pytest.mark.parametrize("forks", [0, 1])
def test_what_nobody_can_fork_is_not_retained(new: Callable[..., Choices], forks: int):
    """No child is expected, or the prompt is not computed."""
    choices = new()
    parent = choices.parent(forks=forks)
    step(choices.scheduler, choices.cache)
    if not forks:
        choices.compute(parent)
    choices.end(parent)
    assert not choices.sampling.retaining and choices.active == 0


def test_children_of_a_parent_that_ends_early_compute_the_prompt(new: Callable[..., Choices]):
    choices = new()
    parent = choices.parent(forks=2)
    step(choices.scheduler, choices.cache)
    first, second = choices.child(2), choices.child(3)
    choices.end(parent)
    assert choices.scheduler.waiting == [first, second] and not first.started
    assert choices.sampling.waiting == 0
    choices.compute(first)
    late = choices.child(4)  # the parent is not known any more
    assert not late.started


def test_an_ended_child_does_not_start(new: Callable[..., Choices]):
    choices = new()
    parent = choices.parent(forks=2)
    first, second = choices.child(2), choices.child(3)
    choices.end(first)
    assert choices.sampling.waiting == 1
    choices.compute(parent)
    assert choices.scheduler.running == [parent, second] and not first.started
    choices.end(generation(4, PROMPT))  # unknown
    child_of_nobody = generation(5, PROMPT)
    child_of_nobody.fork_of = "nobody"
    choices.end(child_of_nobody)


def test_a_second_parent_of_the_same_name_has_no_children(new: Callable[..., Choices]):
    choices = new()
    parent, again = choices.parent(forks=1), choices.parent(forks=1, number=9)
    child = choices.child(2)
    choices.compute(again)
    assert choices.sampling.waiting == 1  # waits for the first
    choices.end(again)
    assert not choices.sampling.retaining and choices.sampling.waiting == 1
    choices.compute(parent)
    assert forked(child)


def test_a_full_batch_forks_nobody(new: Callable[..., Choices]):
    choices = new(max_batch=2)
    parent = choices.parent(forks=2)
    first, second = choices.child(2), choices.child(3)
    choices.compute(parent)
    assert forked(first) and not second.started
    assert choices.scheduler.waiting == [second]


@pytest.mark.parametrize(("pages", "forks"), [(5, False), (6, True)])
def test_a_fork_needs_a_page_for_a_partial_last_one(
    new: Callable[..., Choices], pages: int, forks: bool
):
    choices = new(pages=pages)
    choices.computed(choices.parent())
    child = choices.child(2)
    assert child.started is forks and child.begin == (69 if forks else None)
    assert choices.scheduler.waiting == ([] if forks else [child])


@pytest.mark.parametrize(("pages", "forks"), [(7, False), (8, True)])
def test_a_fork_needs_pages_for_its_own_tokens(
    new: Callable[..., Choices], pages: int, forks: bool
):
    """Four shared ones, a copy of the partial one, and two more."""
    choices = new(pages=pages)
    choices.computed(choices.parent())
    child = choices.child(2, [*PROMPT, *range(500, 530)])
    assert child.started is forks
    assert choices.active == (8 if forks else 5)


def test_nobody_forks_from_a_parent_without_its_kv(new: Callable[..., Choices]):
    """It was preempted, or computes its prompt again."""
    choices = new()
    parent = choices.computed(choices.parent(forks=3))
    choices.scheduler._preempt(parent)
    first = choices.child(2)
    assert not first.started
    choices.scheduler.remove(first)
    choices.cache.add_sequence(parent.seq_id)  # as after a start without a cached prefix
    choices.scheduler.waiting.remove(parent)
    parent.started = True
    choices.scheduler.add(parent)
    second = choices.child(3)
    assert not second.started and choices.cache.length(parent.seq_id) == 0
    assert choices.scheduler.waiting == [second]
    choices.end(parent)
