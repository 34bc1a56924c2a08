"""Pins of cached prefixes: what they protect from eviction, their limit, and unpinning."""

from __future__ import annotations

import pytest
from kv_helpers import SIZE, compute

from kvcache.cache import KVCache
from kvcache.errors import NoCapacity
from kvcache.pages import eviction
from kvcache.pages.eviction import EvictionPolicy
from kvcache.types import PageId, SeqId

A, B = list(range(100, 100 + 4 * SIZE)), list(range(200, 200 + 4 * SIZE))


def cached(cache: KVCache, tokens: list[int], seq_id: int) -> None:
    cache.add_sequence(SeqId(seq_id))
    compute(cache, SeqId(seq_id), tokens)
    cache.publish(SeqId(seq_id), tokens)
    cache.remove_sequence(SeqId(seq_id))


def matched(cache: KVCache, tokens: list[int]) -> int:
    length = cache.add_sequence(SeqId(99), tokens)
    cache.remove_sequence(SeqId(99))
    return length


def fill(cache: KVCache, pages: int) -> None:
    """Take `pages` pages, which evicts cached ones, and free them again."""
    cache.add_sequence(SeqId(98))
    try:
        cache.grow(SeqId(98), pages * SIZE)
    finally:
        cache.remove_sequence(SeqId(98))


def test_a_pinned_prefix_survives_eviction(cache: KVCache) -> None:
    cached(cache, A, 1)
    cached(cache, B, 2)
    assert cache.pin(A) == len(A)
    assert cache.page_use().pinned == 4
    fill(cache, cache.page_use().total - 4)
    assert matched(cache, A) == len(A)
    assert matched(cache, B) == 0


def test_an_unpinned_prefix_may_be_evicted(cache: KVCache) -> None:
    cached(cache, A, 1)
    cache.pin(A)
    assert cache.unpin(A) == len(A)
    assert cache.unpin(A) == 0
    fill(cache, cache.page_use().total)
    assert matched(cache, A) == 0
    assert cache.page_use().pinned == 0


def test_pinned_pages_are_not_counted_as_available(cache: KVCache) -> None:
    cached(cache, A, 1)
    total = cache.page_use().total
    assert cache.available == total
    cache.pin(A)
    assert cache.available == total - 4
    with pytest.raises(NoCapacity):
        fill(cache, total)
    assert matched(cache, A) == len(A)


def test_a_page_with_two_pins_is_kept_until_both_end(cache: KVCache) -> None:
    cached(cache, A, 1)
    cache.pin(A)
    cache.pin(A[: 2 * SIZE])
    cache.unpin(A)
    assert cache.page_use().pinned == 2
    cache.unpin(A[: 2 * SIZE])
    assert cache.page_use().pinned == 0


def test_pinning_again_pins_the_pages_cached_now(cache: KVCache) -> None:
    cached(cache, A[: 2 * SIZE], 1)
    assert cache.pin(A) == 2 * SIZE
    cached(cache, A, 2)
    assert cache.pin(A) == 4 * SIZE
    assert cache.page_use().pinned == 4


def test_uncached_pages_cannot_be_pinned(cache: KVCache) -> None:
    assert cache.pin(A) == 0
    assert cache.page_use().pinned == 0


def test_a_pin_of_nothing_is_not_remembered() -> None:
    policy = EvictionPolicy(9)
    policy.pin(b"a", [PageId(1)])
    policy.pin(b"a", [])
    policy.pin(b"b", [])
    assert policy.pinned == 0
    assert not policy._pinned


def test_at_most_half_of_the_pool_is_pinned() -> None:
    policy = EvictionPolicy(9)
    policy.pin(b"a", [PageId(1), PageId(2), PageId(3)])
    with pytest.raises(NoCapacity):
        policy.pin(b"b", [PageId(4), PageId(5)])
    with pytest.raises(NoCapacity):
        policy.pin(b"a", [PageId(page) for page in range(1, 6)])
    assert policy.pinned == 3
    policy.pin(b"b", [PageId(3), PageId(4)])
    assert policy.unpin(b"a") == 3
    assert policy.pinned == 2


def test_the_scratch_page_does_not_count_towards_the_half() -> None:
    policy = EvictionPolicy(10)  # 9 pages beside it
    policy.pin(b"a", [PageId(page) for page in range(1, 5)])
    with pytest.raises(NoCapacity):
        policy.pin(b"b", [PageId(5)])


def test_pins_of_the_same_pages_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take no further pages, but each is remembered until it is unpinned."""
    assert eviction.MAX_PINS == 1024
    monkeypatch.setattr(eviction, "MAX_PINS", 400)
    policy = EvictionPolicy(9)
    for key in (b"a", b"b", *(b"%d" % number for number in range(398))):
        policy.pin(key, [PageId(1)])
    with pytest.raises(NoCapacity):
        policy.pin(b"c", [PageId(1)])
    policy.pin(b"b", [PageId(1), PageId(2)])
    policy.pin(b"c", [])
    policy.unpin(b"a")
    policy.pin(b"c", [PageId(1)])


def test_a_pin_does_not_keep_a_prompt_that_is_not_cached(cache: KVCache) -> None:
    cached(cache, A, 1)
    assert cache.pin(A + B * 100) == len(A)
    (key,) = cache.bookkeeping.pages.policy._pinned
    assert len(key) < 64
    assert cache.unpin(A + B * 100) == len(A)


def test_pinned_pages_that_a_sequence_shares_do_not_stand_in_its_way(cache: KVCache) -> None:
    cached(cache, A, 1)
    prefix = cache.bookkeeping.pages.prefix
    assert prefix.pinned_beside(A) == 0
    assert cache.bookkeeping.pages.policy.pinned_among([PageId(1)]) == 0
    cache.pin(A)
    assert prefix.pinned_beside(B) == 4
    assert prefix.pinned_beside([*A, *B]) == 0
    assert prefix.pinned_beside([*A[: 2 * SIZE], *B]) == 2
