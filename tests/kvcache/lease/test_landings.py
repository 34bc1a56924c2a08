"""Blocks that come home: landings of a debtor, and a creditor's sends of lent pages into them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

import pytest
from kv_helpers import SIZE, HeldUpCopies, compute, kv_of, sequence

from kvcache.cache import KVCache
from kvcache.errors import (
    BadAddress,
    BadRange,
    BadRequest,
    KVIncomplete,
    LeaseExpired,
    NoCapacity,
    StaleEpoch,
)
from kvcache.lease import SLOTS, Landing
from kvcache.types import EngineId, LeaseId, PageId, SeqId

NewCache = Callable[..., KVCache]
TOKENS = list(range(50, 50 + 3 * SIZE))


@pytest.fixture
def debtor(new_cache: NewCache) -> KVCache:
    return new_cache(name="debtor")


@pytest.fixture
def creditor(new_cache: NewCache) -> KVCache:
    return new_cache(name="creditor", lend_pages=16)


def opened(cache: KVCache, count: int) -> tuple[Landing, str]:
    with cache.lock:
        landing = cache.bookkeeping.landings.open(cache.bookkeeping.pages.take(count))
        return landing, cache.bookkeeping.landings.address(landing)


def sent(creditor: KVCache, address: str, pages: Sequence[PageId]) -> Future[None]:
    target = creditor.page_sends.open(address)
    with creditor.lock:
        return creditor.page_sends.send(target, pages)


def taken(cache: KVCache, landing: Landing) -> list[PageId]:
    with cache.lock:
        return cache.bookkeeping.landings.take(landing)


def drop(cache: KVCache, pages: Sequence[PageId]) -> None:
    with cache.lock:
        cache.bookkeeping.pages.drop(pages)


def abandoned(cache: KVCache, landing: Landing) -> None:
    with cache.lock:
        cache.bookkeeping.pages.drop(cache.bookkeeping.landings.abandon(landing))


def pages_with_kv(cache: KVCache) -> list[PageId]:
    """Return pages that have the KV of `TOKENS`, from position 0 on."""
    sequence(cache, 1, TOKENS)
    return [PageId(page) for page in cache._sequences[SeqId(1)].pages]


def test_pages_come_home_with_their_kv(debtor: KVCache, creditor: KVCache):
    pages = pages_with_kv(creditor)
    landing, address = opened(debtor, 3)
    debtor.check_integrity()
    sent(creditor, address, pages).result(10)
    home = taken(debtor, landing)
    for layer in range(debtor.layout.layers):
        held = debtor.store.pool[layer, home].transpose(1, 2).flatten(0, 1)
        assert held.equal(kv_of(TOKENS, layer))
    drop(debtor, home)
    assert debtor.page_use().free == debtor.total_pages


def test_a_landing_is_not_taken_before_all_has_landed(debtor: KVCache, creditor: KVCache):
    landing, address = opened(debtor, 3)
    with pytest.raises(KVIncomplete):
        taken(debtor, landing)
    sent(creditor, address, pages_with_kv(creditor)[:2]).result(10)
    with pytest.raises(KVIncomplete):
        taken(debtor, landing)
    abandoned(debtor, landing)
    abandoned(debtor, landing)
    assert debtor.page_use().free == debtor.total_pages


def test_nothing_is_written_into_an_abandoned_landing(debtor: KVCache, creditor: KVCache):
    landing, address = opened(debtor, 3)
    pages = pages_with_kv(creditor)
    target = creditor.page_sends.open(address)
    abandoned(debtor, landing)
    compute(debtor, debtor_sequence(debtor), [7] * debtor.total_pages * SIZE)
    before = debtor.store.pool.clone()
    with creditor.lock:
        done = creditor.page_sends.send(target, pages)
    with pytest.raises(LeaseExpired):
        done.result(10)
    assert debtor.store.pool.equal(before)
    with pytest.raises(LeaseExpired):
        creditor.page_sends.open(address)


def debtor_sequence(cache: KVCache) -> SeqId:
    cache.add_sequence(SeqId(99))
    return SeqId(99)


def test_pages_are_held_while_they_are_sent_and_written(
    debtor: KVCache, creditor: KVCache, held_up: HeldUpCopies
):
    pages = pages_with_kv(creditor)
    landing, address = opened(debtor, 3)
    done = sent(creditor, address, pages)
    try:
        assert held_up.reached.wait(10)
        creditor.remove_sequence(SeqId(1))
        creditor.check_integrity()
        assert creditor.page_use().free == creditor.total_pages - 3
        abandoned(debtor, landing)
        debtor.sweep()
        debtor.check_integrity()
        assert debtor.page_use().quarantined == 3
    finally:
        held_up.released.set()
    with pytest.raises(LeaseExpired):
        done.result(10)
    debtor.sweep()
    assert debtor.page_use().free == debtor.total_pages
    assert creditor.page_use().free == creditor.total_pages


def test_addresses_are_checked(debtor: KVCache, creditor: KVCache, new_cache: NewCache):
    landing, address = opened(debtor, 2)
    with pytest.raises(BadAddress):
        creditor.page_sends.open(address[:-4] + "AAAA")
    with pytest.raises(BadAddress):
        new_cache(name="other", fingerprint="other").page_sends.open(address)
    _, lease = debtor.prep_recv("r", TOKENS, SIZE, 0, 10.0)
    with pytest.raises(BadAddress):  # it is for a prompt
        creditor.page_sends.open(lease)
    target, pages = creditor.page_sends.open(address), pages_with_kv(creditor)
    with creditor.lock, pytest.raises(BadRange):
        creditor.page_sends.send(target, pages)
    target.abandon()
    abandoned(debtor, landing)


def test_a_landing_needs_pages_and_a_slot(new_cache: NewCache):
    cache = new_cache(SLOTS + 8)
    with pytest.raises(NoCapacity):
        opened(cache, 0)
    landings = [opened(cache, 1)[0] for _ in range(SLOTS)]
    with cache.lock:
        page = cache.bookkeeping.pages.take(1)
        with pytest.raises(NoCapacity):
            cache.bookkeeping.landings.open(page)
        cache.bookkeeping.pages.drop(page)
    for landing in landings:
        abandoned(cache, landing)
    assert cache.page_use().free == cache.total_pages


def test_only_pages_of_a_live_loan_of_this_debtor_are_sent(creditor: KVCache):
    debtor, one = EngineId("debtor"), LeaseId("1")
    lender = creditor.bookkeeping.lender
    with creditor.lock:
        lent = lender.allocate(debtor, 1, one, 3, at=1)
        assert lent
        lender.check_pages(debtor, 1, one, lent, at=1)
        with pytest.raises(BadRequest):
            lender.check_pages(debtor, 1, one, [*lent, PageId(9)], at=1)
        with pytest.raises(LeaseExpired):
            lender.check_pages(EngineId("other"), 1, one, lent, at=1)
        with pytest.raises(StaleEpoch):
            lender.check_pages(debtor, 1, one, lent, at=2)
        lender.free(debtor, 1, one, at=1)
        with pytest.raises(LeaseExpired):
            lender.check_pages(debtor, 1, one, lent, at=1)
