"""Rules of the scheduler at their limits: room, preemption, shared prefixes and swapping."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from engine_helpers import generation, make_cache
from scheduler_steps import Make, finish, send, step

from engine.scheduling.jobs import Generation
from engine.scheduling.scheduler import Scheduler
from kvcache.cache import KVCache
from kvcache.types import SeqId


def from_lease(cache: KVCache, number: int, tokens: range, **options: Any) -> Generation:
    """Return a generation that has started from a lease, so far without any page."""
    job = generation(number, tokens, **options)
    lease, _ = cache.prep_recv(job.request_id, job.tokens, 0, 0, 10.0)
    job.begin = job.cached = cache.start_lease(lease.lease_id, job.seq_id, job.tokens, None)
    job.started = True
    return job


def names(jobs: list[Any]) -> list[str]:
    return [job.request_id for job in jobs]


@pytest.fixture
def learned(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, float]]:
    """Decodes, prompt tokens and seconds of each recorded step."""
    steps: list[tuple[int, int, float]] = []
    monkeypatch.setattr(
        "engine.scheduling.chunk_budget.ChunkBudget.record", lambda _, *step: steps.append(step)
    )
    return steps


# The batch


def test_a_batch_that_leases_overfill_is_full(make: Make):
    scheduler, cache = make(max_batch=1)
    first, second = generation(1, [1]), generation(2, [2])
    for job in (first, second):
        scheduler.add(job)
    step(scheduler, cache)
    leased = from_lease(cache, 9, range(20))
    scheduler.add(leased)
    step(scheduler, cache)
    assert names(scheduler.running) == ["r1", "r9"] and scheduler.full
    finish(scheduler, cache, first)
    step(scheduler, cache)
    assert names(scheduler.running) == ["r9"] and scheduler.full
    finish(scheduler, cache, leased)
    assert not scheduler.full
    step(scheduler, cache)
    assert names(scheduler.running) == ["r2"]
    finish(scheduler, cache, second)


def test_jobs_of_all_kinds_are_in_the_order_of_their_priority(make: Make):
    scheduler, cache = make(pages=200)
    for number, priority in ((1, 0), (2, 1), (3, 0), (4, -1)):
        scheduler.add(from_lease(cache, number, range(9), priority=priority))
        sending = send(cache, 10 + number, [number] * 9)
        sending.priority = priority
        scheduler.add(sending)
    assert names(scheduler.running) == ["r4", "r1", "r3", "r2"]
    assert names(scheduler.sends) == ["s14", "s11", "s13", "s12"]
    scheduler.remove(scheduler.sends[0])
    for job in list(scheduler.sends):
        scheduler.remove(job)
        scheduler.remove(job)  # has no effect
        cache.remove_sequence(job.seq_id)
    cache.remove_sequence(SeqId(14))
    for job in list(scheduler.running):
        finish(scheduler, cache, job)


@pytest.mark.parametrize(("budget", "first", "second"), [(33, 17, 16), (3, 2, 1), (2, 1, 1)])
def test_the_oldest_prompt_gets_the_larger_half(make: Make, budget: int, first: int, second: int):
    scheduler, cache = make(budget=budget)
    for number, length in ((1, 100), (2, 40)):
        scheduler.add(generation(number, range(1000 * number, 1000 * number + length)))
    assert step(scheduler, cache) == {"r1": first, "r2": second}


def test_a_send_without_tokens_left_is_not_counted(make: Make, monkeypatch: pytest.MonkeyPatch):
    asked: list[tuple[int, int, int]] = []

    def tokens_allowed(_: object, decodes: int, waiting: int, most: int) -> int:
        asked.append((decodes, waiting, most))
        return most

    monkeypatch.setattr("engine.scheduling.chunk_budget.ChunkBudget.tokens_allowed", tokens_allowed)
    scheduler, cache = make(budget=40)
    first = generation(1, range(33))
    scheduler.add(first)
    step(scheduler, cache)
    cache.publish(first.seq_id, first.tokens)
    done, longer = (send(cache, number, list(range(32))) for number in (2, 3))
    longer.tokens = longer.tokens[:20]  # its cached pages reach beyond its end
    for each in (done, longer):
        scheduler.add(each)
    assert step(scheduler, cache) == {"r1": 1}
    scheduler.add(generation(4, range(500, 600)))
    assert step(scheduler, cache) == {"r1": 1, "r4": 39}
    scheduler.add(send(cache, 5, list(range(700, 800))))
    assert step(scheduler, cache) == {"r1": 1, "r4": 20, "s5": 19}
    assert asked == [(0, 1, 40), (1, 1, 39), (1, 2, 39)]
    for each in (done, longer):
        scheduler.remove(each)
        cache.remove_sequence(each.seq_id)


# Preemption


def test_a_chosen_prompt_that_makes_room_for_an_older_one_is_not_computed(
    make: Make, learned: list[tuple[int, int, float]]
):
    """The shorter prompt is chosen first; then the older one finds no page left."""
    scheduler, cache = make(pages=10, budget=128)
    oldest, older = from_lease(cache, 1, range(60)), from_lease(cache, 2, range(1000, 1080))
    short = generation(3, range(2000, 2030))
    for job in (oldest, older, short):
        scheduler.add(job)
    assert step(scheduler, cache) == {"r1": 60, "r2": 38}
    assert scheduler.preemptions == 1
    assert not short.started and scheduler.waiting == [short]
    scheduler.record_steps([0.5])
    assert learned == [(0, 98, 0.5)]
    assert step(scheduler, cache) == {"r1": 1, "r2": 42}
    for job in (oldest, older, short):
        finish(scheduler, cache, job)
    assert scheduler.plan() == []


def test_a_chosen_decode_that_makes_room_for_a_prompt_is_not_computed(
    make: Make, learned: list[tuple[int, int, float]]
):
    scheduler, cache = make(pages=8, budget=128)
    decode, other = generation(1, range(30), priority=1), generation(2, [7, 8])
    for job in (decode, other):
        scheduler.add(job)
    step(scheduler, cache)
    leased = from_lease(cache, 3, range(1000, 1100))
    scheduler.add(leased)
    assert names(scheduler.running) == ["r2", "r3", "r1"]
    assert step(scheduler, cache) == {"r2": 1, "r3": 100}
    assert scheduler.waiting == [decode] and scheduler.preemptions == 1
    scheduler.record_steps([0.5])
    assert learned == [(1, 100, 0.5)]
    for job in (decode, other, leased):
        finish(scheduler, cache, job)


def test_a_prompt_that_a_decode_has_preempted_is_not_chosen(make: Make):
    scheduler, cache = make(pages=4, budget=20)
    decode = generation(1, range(32))
    scheduler.add(decode)
    step(scheduler, cache)
    step(scheduler, cache)
    young = generation(2, range(1000, 1032))
    scheduler.add(young)
    assert step(scheduler, cache) == {"r1": 1}  # its third page is the one that is missing
    while decode.target < 48:
        step(scheduler, cache)
    assert scheduler.waiting == [young]
    finish(scheduler, cache, decode)
    finish(scheduler, cache, young)


def test_without_budget_left_no_job_takes_pages(make: Make, monkeypatch: pytest.MonkeyPatch):
    """It would preempt others for a step in which it computes nothing."""
    scheduler, cache = make(budget=32)
    jobs = [
        from_lease(cache, number, range(1000 * number, 1000 * number + length))
        for number, length in ((1, 100), (2, 30), (3, 60))
    ]
    for job in jobs:
        scheduler.add(job)
    grow, grown = cache.grow, []
    with monkeypatch.context() as patch:
        patch.setattr(cache, "grow", lambda seq, length: grown.append(seq) or grow(seq, length))
        assert step(scheduler, cache) == {"r1": 16, "r2": 16}
    assert SeqId(3) not in grown
    for job in jobs:
        finish(scheduler, cache, job)


def test_a_preempted_job_leaves_its_full_pages_in_the_cache(make: Make):
    scheduler, cache = make(pages=6)
    scheduler.add(old := generation(1, range(40)))
    scheduler.add(young := generation(2, range(1000, 1040)))
    while not scheduler.preemptions:
        step(scheduler, cache)
    assert scheduler.preemptions == 1 and scheduler.waiting == [young]
    assert cache.bookkeeping.pages.prefix.match(young.tokens)
    assert old.started
    for job in (old, young):
        finish(scheduler, cache, job)


# Shared prefixes


@pytest.mark.parametrize(("length", "shared"), [(64, 48), (65, 64), (16, 0), (17, 16), (32, 16)])
def test_each_of_equal_prompts_computes_its_last_token(make: Make, length: int, shared: int):
    scheduler, cache = make(budget=200)
    first, second = generation(1, range(length)), generation(2, range(length))
    for job in (first, second):
        scheduler.add(job)
    both = {"r1": length, "r2": length}
    assert step(scheduler, cache) == ({"r1": length} if shared else both)
    assert step(scheduler, cache) == {"r1": 1, "r2": length - shared if shared else 1}
    assert (second.begin, second.cached) == (shared, shared)


def test_an_urgent_prompt_waits_for_a_prefix_that_a_running_one_computes(make: Make):
    scheduler, cache = make(budget=32)
    scheduler.add(generation(1, range(100)))
    step(scheduler, cache)
    urgent = generation(2, [*range(90), 500], priority=-1)
    scheduler.add(urgent)
    assert [step(scheduler, cache) for _ in range(3)] == [
        {"r1": 32},
        {"r1": 32},
        {"r2": 11, "r1": 4},
    ]
    assert urgent.cached == 80


def test_an_urgent_prompt_gives_its_tokens_to_the_one_that_computes_its_prefix(make: Make):
    """A short prompt between them does not get them."""
    scheduler, cache = make(budget=32)
    scheduler.add(generation(1, range(100)))
    step(scheduler, cache)
    scheduler.add(generation(2, [*range(90), 500], priority=-1))
    scheduler.add(generation(3, range(1000, 1010)))
    assert step(scheduler, cache) == {"r1": 32}
    assert step(scheduler, cache) == {"r1": 22, "r3": 10}


def test_a_prompt_from_a_lease_waits_for_no_other(make: Make):
    """It has KV of its own."""
    scheduler, cache = make(budget=32)
    first = generation(1, range(100))
    scheduler.add(first)
    step(scheduler, cache)
    leased = from_lease(cache, 9, range(60))
    scheduler.add(leased)
    assert step(scheduler, cache) == {"r1": 16, "r9": 16}
    for job in (first, leased):
        finish(scheduler, cache, job)


# Room


def test_the_pages_of_the_head_of_the_queue_are_reserved_until_it_starts(make: Make):
    scheduler, cache = make(pages=10)
    running, large = generation(1, range(40)), generation(2, range(1000, 1130))
    behind = generation(3, range(2000, 2010))
    for job in (running, large, behind):
        scheduler.add(job)
    step(scheduler, cache)
    assert scheduler.stuck is None  # a running job will end
    assert cache.bookkeeping.pages.reserved == 9
    finish(scheduler, cache, behind)
    assert cache.bookkeeping.pages.reserved == 9
    finish(scheduler, cache, running)
    assert step(scheduler, cache) == {"r2": 64}
    assert cache.bookkeeping.pages.reserved == 0
    finish(scheduler, cache, large)


# Swapping


class Swapped:
    """`SwappedGenerations` whose moves end when the test says so. Their KV is lost."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.room = True  # in the tier
        self.moving = False
        self.out: list[Generation] = []
        self.back: list[Generation] = []
        self.asked: list[Generation] = []  # to come back
        self.fits = True  # when asked to come back

    def __contains__(self, job: Generation) -> bool:
        return job in self.out

    def swap_out(self, job: Generation) -> bool:
        if self.room:
            self.out.append(job)
            self.cache.remove_sequence(job.seq_id)
        return self.room

    def swap_in(self, job: Generation) -> bool:
        self.asked.append(job)
        return self.fits

    def returned(self) -> list[Generation]:
        returned, self.back = self.back, []
        for job in returned:
            self.out.remove(job)
            self.cache.add_sequence(job.seq_id)
            self.cache.grow(job.seq_id, job.target)
        return returned

    def remove(self, job: Generation) -> None:
        if job in self.out:
            self.out.remove(job)


Preempted = tuple[Scheduler, KVCache, Swapped, list[Generation]]


@pytest.fixture
def preempted() -> Iterator[Preempted]:
    """Return a scheduler with two generations, of which the younger was swapped out."""
    cache = make_cache(pages=6)
    scheduler = Scheduler(cache, token_budget=64, max_batch=3)
    scheduler._swapped = swapped = Swapped(cache)  # type: ignore[assignment]
    jobs = [generation(1, range(40)), generation(2, range(1000, 1040))]
    for job in jobs:
        scheduler.add(job)
    while not scheduler.preemptions:
        step(scheduler, cache)
    assert scheduler.waiting == [jobs[1]] == swapped.out
    yield scheduler, cache, swapped, jobs
    cache.check_integrity()
    cache.close()


def test_a_swapped_job_returns_before_others_start(preempted: Preempted):
    scheduler, cache, swapped, (old, young) = preempted
    later = generation(3, [1, 2])
    scheduler.add(later)
    finish(scheduler, cache, old)
    assert step(scheduler, cache) == {}
    assert swapped.asked == [young] and scheduler.waiting == [young, later]
    assert scheduler._blocked is None  # it has room, and is on its way
    swapped.back = [young]
    done = step(scheduler, cache)
    assert done.keys() == {"r2", "r3"} and done["r3"] == 2
    assert scheduler.running == [young, later] and young.started
    assert young.begin == 0 and not scheduler._shared.untouched


def test_a_swapped_job_without_room_blocks_the_queue(preempted: Preempted):
    scheduler, cache, swapped, (old, young) = preempted
    swapped.fits = False
    scheduler.add(generation(3, [1, 2]))
    finish(scheduler, cache, old)
    assert step(scheduler, cache) == {}
    assert scheduler.stuck is young and scheduler.running == []
    assert cache.bookkeeping.pages.reserved == -(-young.target // 16)
    assert scheduler.drop_swap(young) and young not in swapped
    assert not scheduler.drop_swap(young)
    assert step(scheduler, cache).keys() == {"r2", "r3"}


def test_a_removed_job_leaves_the_tier(preempted: Preempted):
    scheduler, cache, swapped, (old, young) = preempted
    scheduler.remove(young)
    assert scheduler.waiting == [] and not swapped.out
    finish(scheduler, cache, old)


def test_nobody_is_preempted_while_pages_move(preempted: Preempted):
    scheduler, cache, swapped, (old, young) = preempted
    scheduler.remove(young)
    third = generation(3, range(2000, 2010))
    scheduler.add(third)
    swapped.moving = True
    while "r1" in (done := step(scheduler, cache)):
        assert old.target < 100
    assert done == {"r3": 1}  # the older one waits for a page, and keeps those that it has
    assert scheduler.preemptions == 1 and scheduler.running == [old, third]
    swapped.moving = False
    assert step(scheduler, cache) == {"r1": 1}
    assert scheduler.preemptions == 2 and scheduler.waiting == [third]
    finish(scheduler, cache, old)


def test_a_full_tier_lets_the_job_compute_its_tokens_again(preempted: Preempted):
    scheduler, cache, swapped, (old, young) = preempted
    swapped.room = False
    scheduler.remove(young)
    scheduler.add(third := generation(3, range(2000, 2040)))
    finish(scheduler, cache, old)
    scheduler.add(fourth := generation(4, range(3000, 3040)))
    while scheduler.preemptions == 1:
        step(scheduler, cache)
    assert scheduler.waiting == [fourth] and not swapped.out
    assert cache.bookkeeping.pages.prefix.match(fourth.tokens)
    finish(scheduler, cache, third)
    finish(scheduler, cache, fourth)


def test_without_swapping_the_tier_is_not_asked():
    cache = make_cache(pages=6)
    scheduler = Scheduler(cache, token_budget=64, max_batch=3, swap=False)
    scheduler._swapped = swapped = Swapped(cache)  # type: ignore[assignment]
    for number in range(2):
        scheduler.add(generation(number, range(1000 * number, 1000 * number + 40)))
    while not scheduler.preemptions:
        step(scheduler, cache)
    assert not swapped.out
    cache.close()


def test_a_running_job_that_finds_no_room_for_itself_is_preempted(make: Make):
    """Leases took the pages."""
    scheduler, cache = make(pages=4)
    job = generation(1, range(30))
    scheduler.add(job)
    lease, _ = cache.prep_recv("r", range(200, 232), 32, 0, 10.0)
    while job.started or not scheduler.preemptions:
        step(scheduler, cache)
        assert job.target < 60
    assert scheduler.running == [] and scheduler.waiting == [job]
    assert step(scheduler, cache) == {} and scheduler.stuck is job
    cache.release(lease.lease_id)
    assert step(scheduler, cache)
    finish(scheduler, cache, job)
