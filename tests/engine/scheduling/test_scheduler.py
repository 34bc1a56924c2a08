"""The scheduler over a real cache; a step only marks its tokens as present."""

from __future__ import annotations

import math

import pytest
from engine_helpers import generation, make_cache
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_steps import PAGE, Make, finish, send, step

from engine.scheduling.jobs import Generation, Job, Send
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.swapped import SwappedGenerations


def test_nothing_to_do_is_an_empty_plan(make: Make):
    scheduler, _ = make()
    assert scheduler.plan() == []


def test_a_prompt_is_chunked_by_the_budget(make: Make):
    scheduler, cache = make(budget=40)
    scheduler.add(generation(1, range(100)))
    assert [step(scheduler, cache) for _ in range(4)] == [
        {"r1": 40},
        {"r1": 40},
        {"r1": 20},
        {"r1": 1},
    ]


def test_every_decode_is_in_every_step(make: Make):
    scheduler, cache = make(budget=4)  # fewer tokens than decodes
    for number in range(8):
        scheduler.add(generation(number, [number]))
    step(scheduler, cache)
    scheduler.add(generation(50, range(200, 240)))
    scheduler.add(send(cache, 60, list(range(300, 340))))
    for _ in range(10):
        done = step(scheduler, cache)
        assert {f"r{number}" for number in range(8)} <= set(done)
        assert all(done[f"r{number}"] == 1 for number in range(8))


def test_the_batch_is_bounded(make: Make):
    scheduler, cache = make(max_batch=2)
    jobs = [generation(number, [number]) for number in range(3)]
    for job in jobs:
        scheduler.add(job)
    assert set(step(scheduler, cache)) == {"r0", "r1"}
    finish(scheduler, cache, jobs[0])
    assert set(step(scheduler, cache)) == {"r1", "r2"}


@pytest.mark.parametrize("decodes", [0, 3, 5, 7, 9])
def test_neither_sends_nor_prefills_starve(make: Make, decodes: int):
    """Each kind gets tokens in every step, however few the decodes leave."""
    scheduler, cache = make(pages=200, budget=8, max_batch=64)
    for number in range(decodes):
        scheduler.add(generation(number, [number]))
    step(scheduler, cache)
    for number in range(3):
        scheduler.add(generation(20 + number, range(1000 * number, 1000 * number + 60)))
        base = 10_000 + 1000 * number
        scheduler.add(send(cache, 40 + number, list(range(base, base + 60))))
    for _ in range(8):
        done = step(scheduler, cache)
        assert any(name in done for name in ("r20", "r21", "r22"))
        assert any(name in done for name in ("s40", "s41", "s42"))
        assert sum(done.values()) <= max(8, decodes + 2)


def test_one_kind_alone_gets_the_whole_budget(make: Make):
    scheduler, cache = make(budget=30)
    scheduler.add(send(cache, 1, list(range(100))))
    assert step(scheduler, cache) == {"s1": 30}


def test_equal_jobs_are_first_come_first_served(make: Make):
    scheduler, cache = make(budget=32)
    for number in range(3):
        scheduler.add(generation(number, range(1000 * number, 1000 * number + 40)))
    assert step(scheduler, cache) == {"r0": 32}
    assert step(scheduler, cache) == {"r0": 8, "r1": 24}


def test_a_short_prompt_overtakes_any_number_of_long_ones(make: Make):
    scheduler, cache = make(pages=200)
    for number in range(5):
        scheduler.add(generation(number, range(1000 * number, 1000 * number + 500)))
    step(scheduler, cache)
    scheduler.add(generation(9, range(9000, 9030)))
    assert step(scheduler, cache) == {"r0": 34, "r9": 30}


def test_a_short_send_overtakes_a_long_one(make: Make):
    scheduler, cache = make()
    scheduler.add(send(cache, 1, list(range(300))))
    step(scheduler, cache)
    scheduler.add(send(cache, 2, list(range(1000, 1020))))
    assert step(scheduler, cache) == {"s1": 44, "s2": 20}


def test_short_prompts_leave_half_the_budget_to_a_long_one(make: Make):
    scheduler, cache = make(pages=200)
    long = generation(1, range(320))
    scheduler.add(long)
    for number in range(10):
        shorts = [
            generation(base, range(100 * base, 100 * base + 40))
            for base in (100 + 2 * number, 101 + 2 * number)
        ]
        for job in shorts:
            scheduler.add(job)
        assert step(scheduler, cache)["r1"] == 32
        for job in shorts:
            finish(scheduler, cache, job)
    assert len(long.tokens) == 321


@given(
    prompts=st.lists(st.tuples(st.integers(0, 6), st.integers(1, 200)), min_size=1, max_size=6),
    kind=st.sampled_from([Generation, Send]),
)
@settings(deadline=None)
def test_every_prompt_is_computed_within_both_bounds(
    prompts: list[tuple[int, int]], kind: type[Job]
):
    """The bounds of the scheduler's docstring, for prompts of any length at any time."""
    cache = make_cache(pages=100)
    budget = 40
    scheduler = Scheduler(cache, token_budget=budget, max_batch=16)
    half = (budget - len(prompts)) // 2  # a decode takes its token from the budget
    arrivals = sorted(prompts, key=lambda prompt: prompt[0])
    left: dict[str, int] = {}
    allowed: dict[str, int] = {}  # the latest step in which it may finish
    at = 0
    while left or at <= arrivals[-1][0]:
        for number, (when, length) in enumerate(arrivals):
            if when == at:
                tokens = range(1000 * number, 1000 * number + length)
                job = generation(number, tokens) if kind is Generation else None
                scheduler.add(job or send(cache, number, list(tokens)))
                name = f"{'r' if job else 's'}{number}"
                left[name] = length
                older = sum(math.ceil(other / half) for other in left.values())
                later = [other for then, other in arrivals if then > at]
                others = [*left.values(), *later]
                shorter = sum(min(other, length) for other in others)  # including itself
                allowed[name] = at + min(older, math.ceil(shorter / half)) - 1
        done = step(scheduler, cache)
        for job in list(scheduler.running):
            if job.target > job.prompt_len:
                finish(scheduler, cache, job)
        for name, count in done.items():
            left[name] -= count
            if not left[name]:
                del left[name]
                assert at <= allowed[name], name
        at += 1
    cache.check_integrity()
    cache.close()


def test_a_prefix_shared_by_waiting_prompts_is_computed_once(make: Make):
    """Shorter prompts give their tokens to the job that computes the shared prefix."""
    scheduler, cache = make(pages=200, budget=32)
    shared = list(range(64))
    long, other = generation(1, range(5000, 5300)), generation(2, [*shared, *range(600, 800)])
    short, same = generation(3, [*shared, 900, 901]), generation(4, [*shared, 900, 901])
    for job in (long, other, short, same):
        scheduler.add(job)
    for _ in range(4):
        assert step(scheduler, cache) == {"r1": 16, "r2": 16}
    assert step(scheduler, cache) == {"r1": 16, "r3": 2, "r4": 2, "r2": 12}
    assert (short.cached, same.cached) == (64, 64)


def test_prompts_take_the_time_that_the_slowdown_allows(make: Make):
    scheduler, cache = make(pages=200, budget=256, slowdown=2.0)

    def timed() -> dict[str, int]:
        """Run a step that takes 10 ms and 0.25 ms more for each prompt token."""
        done = step(scheduler, cache)
        scheduler.record_steps([0.01 + 0.00025 * sum(n for n in done.values() if n > 1)])
        return done

    scheduler.add(generation(1, range(100)))
    assert timed() == {"r1": 100}
    scheduler.add(generation(2, range(1000, 1500)))
    scheduler.add(send(cache, 3, list(range(2000, 2500))))
    assert [timed(), timed()] == [{"r1": 1}] * 2  # probes
    for _ in range(8):
        assert timed().keys() == {"r1", "r2", "s3"}
    done = timed()
    # Two wait and one decodes: prompts get twice the time of the decode.
    assert (done["r1"], done["r2"], done["s3"]) == (1, 40, pytest.approx(40, abs=1))


def test_slow_prompts_always_progress(make: Make):
    scheduler, cache = make(pages=200, budget=256, slowdown=1.5)
    scheduler.add(generation(1, range(10)))
    step(scheduler, cache)
    for _ in range(3):
        step(scheduler, cache)
        scheduler.record_steps([0.001])
    scheduler.add(generation(2, range(1000, 1500)))
    scheduler.add(send(cache, 3, list(range(2000, 2500))))
    for _ in range(20):
        assert step(scheduler, cache) == {"r1": 1, "r2": 2, "s3": 2}
        scheduler.record_steps([10.0])


def test_a_prior_job_overtakes_waiting_jobs(make: Make):
    scheduler, cache = make(max_batch=1)
    first = generation(1, [1])
    scheduler.add(first)
    step(scheduler, cache)
    for number, priority in ((2, 0), (3, -1), (4, 1), (5, -1), (6, 0)):
        scheduler.add(generation(number, [number], priority=priority))
    assert [job.request_id for job in scheduler.waiting] == ["r3", "r5", "r2", "r6", "r4"]
    finish(scheduler, cache, first)
    assert step(scheduler, cache) == {"r3": 1}


def test_a_prior_job_gets_both_halves_of_the_budget(make: Make):
    scheduler, cache = make(budget=32)
    scheduler.add(generation(1, range(100)))
    scheduler.add(generation(2, range(1000, 1020)))
    scheduler.add(generation(3, range(2000, 2100), priority=-1))
    assert step(scheduler, cache) == {"r3": 32}
    low, high = send(cache, 4, list(range(3000, 3100))), send(cache, 5, list(range(4000, 4100)))
    high.priority = -1
    scheduler.add(low)
    scheduler.add(high)
    assert step(scheduler, cache) == {"r3": 16, "s5": 16}


def test_the_youngest_job_of_the_lowest_priority_is_preempted(make: Make):
    scheduler, cache = make(pages=12)
    low, lower, high = (
        generation(number, range(1000 * number, 1000 * number + 40), priority=priority)
        for number, priority in ((1, 1), (2, 1), (3, 0))
    )
    for job in (low, lower, high):
        scheduler.add(job)
        step(scheduler, cache)
    assert scheduler.running == [high, low, lower]
    urgent = generation(4, range(9000, 9100), priority=0)
    late = generation(5, range(9200, 9216), priority=1)
    scheduler.add(late)
    scheduler.add(urgent)  # has no room, so later jobs wait too
    while not scheduler.preemptions:
        step(scheduler, cache)
    assert scheduler.running == [high, low]
    assert scheduler.waiting == [urgent, lower, late]


def test_cached_tokens_are_not_computed(make: Make):
    scheduler, cache = make()
    first = generation(1, range(40))
    scheduler.add(first)
    step(scheduler, cache)
    cache.publish(first.seq_id, first.tokens)
    second = generation(2, range(40))
    scheduler.add(second)
    assert step(scheduler, cache)["r2"] == 8
    assert (second.cached, second.begin) == (32, 32)


def test_a_waiting_job_starts_after_pages_cached_meanwhile(make: Make):
    scheduler, cache = make(budget=40)
    first, second = generation(1, range(100)), generation(2, [*range(90), 500, 501])
    stranger = generation(3, range(1000, 1010))
    for job in (first, second, stranger):
        scheduler.add(job)
    assert [step(scheduler, cache) for _ in range(3)] == [
        {"r1": 30, "r3": 10},
        {"r3": 1, "r1": 39},
        {"r3": 1, "r1": 31},  # the second job waits for the 80 tokens that the first one computes
    ]
    assert step(scheduler, cache) == {"r1": 1, "r3": 1, "r2": 12}
    assert (second.cached, second.begin) == (80, 80)
    assert (stranger.cached, stranger.begin) == (0, 0)


def test_kv_landed_in_a_lease_is_not_replaced_by_cached_pages(make: Make):
    """The landed KV is not in the prefix cache yet."""
    scheduler, cache = make(budget=4)
    scheduler.add(generation(1, range(100, 120)))
    job = generation(2, range(40))
    lease, address = cache.prep_recv("r", job.tokens, 32, 0, 10.0)
    put = cache.open_put(address, job.tokens, 0, 32)
    put.signal(32)
    put.close().result(10)
    job.begin = job.cached = cache.start_lease(lease.lease_id, job.seq_id, job.tokens, 32)
    job.started = True
    scheduler.add(job)
    computed = 0
    while job.target == 40:
        computed += step(scheduler, cache).get("r2", 0)
    assert (computed, job.begin) == (8, 32)


def test_the_last_token_is_always_computed(make: Make):
    scheduler, cache = make()
    first = generation(1, range(32))
    scheduler.add(first)
    step(scheduler, cache)
    cache.publish(first.seq_id, first.tokens)
    second = generation(2, range(32))
    scheduler.add(second)
    assert step(scheduler, cache)["r2"] == 16


def test_a_prompt_waits_for_pages(make: Make):
    scheduler, cache = make(pages=6)
    first, second = generation(1, range(64)), generation(2, range(100, 164))
    scheduler.add(first)
    scheduler.add(second)
    step(scheduler, cache)
    assert (len(scheduler.running), len(scheduler.waiting)) == (1, 1)
    finish(scheduler, cache, first)
    assert step(scheduler, cache) == {"r2": 64}


def test_preemption_keeps_the_output_and_repeats_nothing(
    make: Make,
):
    scheduler, cache = make(pages=8)
    old, young = generation(1, range(40)), generation(2, range(100, 140))
    scheduler.add(old)
    scheduler.add(young)
    seen: list[int] = []
    while not scheduler.preemptions:
        step(scheduler, cache)
        assert young.tokens[: len(seen)] == seen
        seen = list(young.tokens)
    assert not young.started and old.started
    begin, cached = young.begin, young.cached
    while len(old.tokens) < 100:
        step(scheduler, cache)
    finish(scheduler, cache, old)
    step(scheduler, cache)
    assert young.started
    assert young.tokens[: len(seen)] == seen
    assert (young.begin, young.cached) == (begin, cached)  # its own pages do not count as cached
    assert young.tokens[len(seen) :] == [100 + n for n in range(len(seen), len(young.tokens))]


def test_the_oldest_always_progresses(make: Make):
    scheduler, cache = make(pages=10)
    jobs = [generation(number, range(1000 * number, 1000 * number + 30)) for number in range(5)]
    for job in jobs:
        scheduler.add(job)
    for _ in range(400):
        step(scheduler, cache)
        if all(len(job.tokens) >= 60 for job in jobs):
            break
        for job in jobs:
            if job in scheduler.running and len(job.tokens) >= 60:
                finish(scheduler, cache, job)
    assert all(len(job.tokens) >= 60 for job in jobs)
    assert scheduler.preemptions > 0


def test_a_job_that_fits_alone_progresses(make: Make):
    scheduler, cache = make(pages=8)
    job = generation(1, range(100))
    scheduler.add(job)
    while len(job.tokens) < 8 * PAGE:
        assert step(scheduler, cache)
    assert scheduler.preemptions == 0


def test_an_aborted_job_leaves_nothing(make: Make):
    scheduler, cache = make(max_batch=1)
    running, waiting = generation(1, [1]), generation(2, [2])
    sending = send(cache, 3, [3])
    for job in (running, waiting, sending):
        scheduler.add(job)
    step(scheduler, cache)
    for job in (running, waiting):
        finish(scheduler, cache, job)
        scheduler.remove(job)  # idempotent
    assert step(scheduler, cache) == {}


def test_a_started_generation_runs_at_once(make: Make):
    """A generation from a lease runs even if the batch is full."""
    scheduler, cache = make(max_batch=1)
    for number in range(3):
        scheduler.add(generation(number, [number]))
    job = generation(9, range(20))
    lease, _ = cache.prep_recv("r", job.tokens, 0, 0, 10.0)
    job.cached = cache.start_lease(lease.lease_id, job.seq_id, job.tokens, None)
    job.started = True
    scheduler.add(job)
    assert step(scheduler, cache)["r9"] == 20


def test_the_head_of_the_queue_is_stuck_only_if_no_job_holds_pages(
    make: Make, monkeypatch: pytest.MonkeyPatch
):
    scheduler, cache = make(pages=6)
    sending, job = send(cache, 1, list(range(5 * PAGE))), generation(2, range(1000, 1032))
    for each in (sending, job):
        scheduler.add(each)
    scheduler.plan()
    assert scheduler.waiting == [job] and scheduler.stuck is None  # the send will end
    scheduler.remove(sending)
    scheduler.plan()
    assert scheduler.stuck is job
    with monkeypatch.context() as moving:
        moving.setattr(SwappedGenerations, "moving", True)
        assert scheduler.stuck is None
    cache.remove_sequence(sending.seq_id)
    scheduler.plan()
    assert scheduler.running == [job] and scheduler.stuck is None
    finish(scheduler, cache, job)


def test_removed_jobs_are_not_remembered(make: Make):
    """One waits for the prefix that another computes, one has just been computed."""
    scheduler, cache = make(budget=40)
    first, waits = generation(1, range(100)), generation(2, [*range(90), 500])
    blocked = generation(3, range(2000, 3000))
    for job in (first, waits, blocked):
        scheduler.add(job)
    step(scheduler, cache)
    assert scheduler._shared.untouched == {waits} and scheduler._unpublished == [first]
    assert scheduler._blocked is blocked
    for job in (waits, first, blocked):
        finish(scheduler, cache, job)
    assert not scheduler._shared.untouched and not scheduler._unpublished
    assert scheduler._blocked is None


def test_a_preempted_job_does_not_count_as_untouched(make: Make):
    scheduler, cache = make(pages=14, budget=40)
    first, waits = generation(1, range(100)), generation(2, [*range(90), 500])
    for job in (first, waits):
        scheduler.add(job)
    step(scheduler, cache)
    assert scheduler._shared.untouched == {waits}
    scheduler._preempt(waits)
    assert not scheduler._shared.untouched
    for job in (first, waits):
        finish(scheduler, cache, job)
