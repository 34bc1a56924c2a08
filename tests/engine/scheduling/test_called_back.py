"""Pages that are lent to other engines, when the scheduler needs them itself."""

from __future__ import annotations

import time

import pytest
from engine_helpers import generation
from scheduler_steps import PAGE, Make, finish, step

from kvcache.cache import KVCache
from kvcache.types import EngineId, LeaseId

DEBTOR, EPOCH = EngineId("debtor"), 1


def lend(cache: KVCache, lease_id: str, size: int) -> None:
    with cache.lock:
        assert cache.bookkeeping.lend(DEBTOR, 1, LeaseId(lease_id), size, at=EPOCH)


def free(cache: KVCache, lease_id: str) -> None:
    with cache.lock:
        cache.bookkeeping.take_back(DEBTOR, 1, LeaseId(lease_id), at=EPOCH)


def called_back(cache: KVCache) -> list[str]:
    with cache.lock:
        return [loan.lease_id for loan in cache.bookkeeping.lender.loans() if loan.called_back]


def test_loans_are_called_back_before_a_generation_is_preempted(
    make: Make, monkeypatch: pytest.MonkeyPatch
):
    scheduler, cache = make(pages=6, lend_pages=4)
    old, young = generation(1, range(2 * PAGE - 2)), generation(2, range(500, 500 + PAGE - 2))
    for job in (old, young):
        scheduler.add(job)
    step(scheduler, cache)
    lend(cache, "1", 1)  # 2, of 6: each generation keeps one to grow into
    seen: list[list[str]] = []
    preempt = scheduler._preempt
    monkeypatch.setattr(
        scheduler, "_preempt", lambda job: (seen.append(called_back(cache)), preempt(job))
    )
    while not seen:
        step(scheduler, cache)
    assert seen == [["1"]] and scheduler.waiting == [young]
    free(cache, "1")
    for _ in range(2):
        step(scheduler, cache)
    assert young.started or old.started
    assert len(old.tokens) > 2 * PAGE
    for job in (old, young):
        finish(scheduler, cache, job)


def test_a_loan_past_its_deadline_saves_a_generation_from_preemption(make: Make):
    scheduler, cache = make(pages=4, lend_pages=1, loan_s=0.001)
    job = generation(1, range(2 * PAGE - 1))
    scheduler.add(job)
    step(scheduler, cache)
    lend(cache, "1", 1)
    time.sleep(0.002)
    while len(job.tokens) < 4 * PAGE:
        step(scheduler, cache)
    assert scheduler.preemptions == 0
    finish(scheduler, cache, job)


def test_the_head_of_the_queue_calls_back_what_it_lacks_and_is_not_stuck(make: Make):
    scheduler, cache = make(pages=8, lend_pages=6)
    for number in range(3):
        lend(cache, str(number), 2)
    job = generation(1, range(5 * PAGE))
    scheduler.add(job)
    assert step(scheduler, cache) == {}
    assert called_back(cache) == ["1", "2"]  # the latest ones; it lacks three pages
    assert scheduler.stuck is None  # for a loan ends by itself
    free(cache, "2")
    assert step(scheduler, cache) == {} and scheduler.stuck is None
    free(cache, "1")
    assert step(scheduler, cache)
    finish(scheduler, cache, job)
    free(cache, "0")
