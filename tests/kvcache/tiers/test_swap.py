"""Sequences that leave the device and come back, at every interleaving (DistServe)."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
from gated_store import PATIENCE_S, GatedStore, close_in_mid_copy
from kv_helpers import SIZE, assert_content, cached, compute, pages_of, sequence, small_layout
from tier_helpers import at_rest, quiet, tiered, tiered_caches

from kvcache.cache import KVCache
from kvcache.errors import Internal, NoCapacity
from kvcache.sequences.step import SendRange
from kvcache.tiers.disk_store import DiskStore
from kvcache.tiers.store import HostStore
from kvcache.types import SeqId

LAYOUT = small_layout(1)
TOKENS = list(range(100, 100 + 3 * SIZE + 1))  # the last of four pages is not full
ONE = SeqId(1)


@pytest.fixture
def store() -> GatedStore:
    return GatedStore(LAYOUT, 8)


@pytest.fixture
def new() -> Iterator[Callable[..., KVCache]]:
    with tiered_caches() as make:
        yield make


@pytest.fixture
def cache(new: Callable[..., KVCache], store: GatedStore) -> KVCache:
    cache = new(store)
    sequence(cache, ONE, TOKENS)
    return cache


def done(future: Future[int]) -> int:
    return future.result(PATIENCE_S)


def test_a_sequence_is_swapped_out_and_in(cache: KVCache):
    cache.grow(ONE, 6 * SIZE)  # room that it has not used needs no slots
    assert done(cache.swap_out(ONE)) == len(TOKENS)
    use, (tier,) = cache.page_use(), cache.tier_use()
    assert (use.free, use.active) == (8, 0)
    assert (tier.swapped, tier.copying, tier.free) == (4, 0, 4)
    cache.check_integrity()
    assert done(cache.swap_in(ONE, 5 * SIZE)) == len(TOKENS)
    assert_content_of(cache, ONE, TOKENS)
    assert len(pages_of(cache, ONE)) == 5
    assert cache.tier_use()[0].free == 8
    compute(cache, ONE, [1, 2, 3])
    assert_content_of(cache, ONE, [*TOKENS, 1, 2, 3])
    cache.remove_sequence(ONE)
    stats = next(iter(cache.tiers)).stats
    assert (stats.swaps_out, stats.swaps_in) == (1, 1)


def assert_content_of(cache: KVCache, seq_id: SeqId, tokens: list[int]) -> None:
    """Like `assert_content`, whatever capacity the sequence has beyond its length."""
    cache.check_integrity()
    assert_content(cache, seq_id, tokens)


USES: dict[str, Callable[[KVCache], Any]] = {
    "begin_forward": lambda cache: cache.begin_forward([ONE], [1]),
    "fork": lambda cache: cache.fork_sequence(ONE, SeqId(2), 3),
    "pop": lambda cache: cache.pop(ONE, 1),
    "grow": lambda cache: cache.grow(ONE, 20),
    "length": lambda cache: cache.length(ONE),
    "publish": lambda cache: cache.publish(ONE, TOKENS),
    "mark_send": lambda cache: cache.mark_send(ONE, cast(Any, None), 0, 1),
    "mirror": lambda cache: cache.mirror(ONE, cast(Any, None), 1),
    "swap_out": lambda cache: cache.swap_out(ONE),
    "add": lambda cache: cache.add_sequence(ONE),
}


@pytest.mark.parametrize("use", list(USES))
def test_a_swapped_sequence_refuses_all_operations(cache: KVCache, store: GatedStore, use: str):
    """While it is copied out, while it is out, and while it is copied in."""
    store.gate.shut()
    out = cache.swap_out(ONE)
    for _ in range(2):
        with pytest.raises(Internal, match=r"swapped out|exists"):
            USES[use](cache)
        store.gate.open()
        done(out)
    store.gate.shut()
    back = cache.swap_in(ONE)
    with pytest.raises(Internal, match=r"swapped out|exists"):
        USES[use](cache)
    store.gate.open()
    done(back)
    assert_content_of(cache, ONE, TOKENS)
    cache.remove_sequence(ONE)


def test_a_swap_in_happens_once_and_after_the_swap_out(cache: KVCache, store: GatedStore):
    with pytest.raises(Internal, match="not swapped out"):
        cache.swap_in(ONE)
    store.gate.shut()
    out = cache.swap_out(ONE)
    with pytest.raises(Internal, match="not swapped out"):
        cache.swap_in(ONE)
    store.gate.open()
    done(out)
    store.gate.shut()
    back = cache.swap_in(ONE)
    with pytest.raises(Internal, match="not swapped out"):
        cache.swap_in(ONE)
    store.gate.open()
    done(back)
    cache.remove_sequence(ONE)


def test_pages_under_copy_are_neither_free_nor_used(cache: KVCache, store: GatedStore):
    store.gate.shut()
    out = cache.swap_out(ONE)
    store.gate.one()
    cache.check_integrity()
    assert cache.page_use().active == 4
    assert cache.tier_use()[0].copying == 4
    other = sequence(cache, 2, [7] * (4 * SIZE))
    with pytest.raises(NoCapacity):
        cache.grow(other, 5 * SIZE)
    store.gate.open()
    done(out)
    with pytest.raises(NoCapacity):  # there are four pages, but `other` needs one to grow into
        cache.swap_in(ONE)
    cache.grow(other, 5 * SIZE)
    store.gate.shut()
    cache.pop(other, SIZE)
    back = cache.swap_in(ONE)
    store.gate.one()
    cache.check_integrity()
    assert cache.tier_use()[0].copying == 4
    cache.grow(other, 4 * SIZE)
    with pytest.raises(NoCapacity):
        cache.grow(other, 5 * SIZE)
    store.gate.open()
    done(back)
    assert_content_of(cache, ONE, TOKENS)
    cache.remove_sequence(ONE)
    cache.remove_sequence(other)


@pytest.mark.parametrize("when", ["queued", "copying out", "out", "copying in"])
def test_a_sequence_may_be_removed_at_any_moment(cache: KVCache, store: GatedStore, when: str):
    if when == "queued":
        store.gate.shut()
        cached(cache, 3, [9] * SIZE)  # keeps the thread busy
        store.gate.one()
        cache.swap_out(ONE)
    else:
        if when == "copying out":
            store.gate.shut()
        out = cache.swap_out(ONE)
        if when == "copying out":
            store.gate.one()
        else:
            done(out)
            if when == "copying in":
                store.gate.shut()
                cache.swap_in(ONE)
                store.gate.one()
    cache.remove_sequence(ONE)
    cache.check_integrity()
    with pytest.raises(Internal, match="no sequence"):
        cache.length(ONE)
    again = sequence(cache, ONE, [1, 2, 3])  # the name is free at once
    cache.check_integrity()
    store.gate.open()
    quiet(cache)
    assert_content_of(cache, again, [1, 2, 3])
    cache.remove_sequence(again)
    stats = next(iter(cache.tiers)).stats
    assert stats.bytes_in <= 2 * LAYOUT.page_bytes or when in ("out", "copying in")


def test_swaps_evict_prefixes_and_not_the_reverse(cache: KVCache):
    """Swaps evict prefixes, but prefixes never evict swaps."""
    cached(cache, 2, list(range(4 * SIZE)))
    quiet(cache)
    assert cache.tier_use()[0].cached == 4
    two = sequence(cache, 3, [8] * (2 * SIZE))
    done(cache.swap_out(ONE))
    done(cache.swap_out(two))
    use = cache.tier_use()[0]
    assert (use.swapped, use.cached, use.free) == (6, 2, 0)
    three = sequence(cache, 4, [9] * (3 * SIZE))
    with pytest.raises(NoCapacity):
        cache.swap_out(three)
    assert_content_of(cache, three, [9] * (3 * SIZE))  # nothing has changed
    cache.publish(three, [9] * (3 * SIZE))
    quiet(cache)
    assert cache.tier_use()[0].swapped == 6
    cache.remove_sequence(three)
    done(cache.swap_in(two))
    assert_content_of(cache, two, [8] * (2 * SIZE))
    for seq_id in (ONE, two):
        cache.remove_sequence(seq_id)


def test_swaps_do_not_wait_for_prefixes(cache: KVCache, store: GatedStore):
    store.gate.shut()
    cached(cache, 2, list(range(4 * SIZE)))
    store.gate.one()
    out = cache.swap_out(ONE)
    store.gate.open()
    done(out)
    quiet(cache)
    behind = {slot for pages in next(iter(cache.tiers)).manager.prefix.holders() for slot in pages}
    assert [slot in behind for slot in store.filled] == [True] + [False] * 4 + [True] * 3
    cache.remove_sequence(ONE)


def test_a_prefix_whose_start_was_evicted_by_a_swap_is_dropped(
    new: Callable[..., KVCache],
):
    """Its third page would be found as its first."""
    store = GatedStore(LAYOUT, 5)
    cache = new(store)
    sequence(cache, ONE, TOKENS)
    store.gate.shut(after=2)
    prompt = list(range(4 * SIZE))
    cached(cache, 2, prompt)
    store.gate.one()
    out = cache.swap_out(ONE)  # takes all slots but the one that is being filled
    store.gate.open()
    done(out)
    quiet(cache)
    assert cache.tier_use()[0].swapped == 4
    cache.remove_sequence(ONE)
    cache.add_sequence(ONE)
    cache.grow(ONE, 8 * SIZE)
    cache.remove_sequence(ONE)
    back = cache.promote(prompt)
    assert back is not None and done(back) == SIZE  # its first page was copied again
    assert_content_of(cache, sequence(cache, 3, prompt), prompt)
    cache.remove_sequence(SeqId(3))


def test_a_full_host_swaps_to_the_disk(new: Callable[..., KVCache], tmp_path: Path):
    cache = new(HostStore(LAYOUT, 3), DiskStore(LAYOUT, 4, tmp_path))
    sequence(cache, ONE, TOKENS)
    done(cache.swap_out(ONE))
    assert [tier.swapped for tier in cache.tier_use()] == [0, 4]
    done(cache.swap_in(ONE))
    assert_content_of(cache, ONE, TOKENS)
    cache.remove_sequence(ONE)


def test_a_tier_without_room_keeps_its_prefixes(new: Callable[..., KVCache], tmp_path: Path):
    cache = new(HostStore(LAYOUT, 3), DiskStore(LAYOUT, 8, tmp_path))
    cached(cache, 1, TOKENS[: 3 * SIZE])
    quiet(cache)
    sequence(cache, ONE, TOKENS)
    done(cache.swap_out(ONE))
    assert [tier.cached for tier in cache.tier_use()] == [3, 3]
    assert [tier.swapped for tier in cache.tier_use()] == [0, 4]
    cache.remove_sequence(ONE)


@pytest.mark.parametrize("page", range(4))
def test_a_failed_write_truncates_the_sequence(cache: KVCache, store: GatedStore, page: int):
    store.fail_at = page
    kept = page * SIZE
    assert done(cache.swap_out(ONE)) == kept
    assert cache.tier_use()[0].swapped == page
    assert cache.page_use().free == 8
    assert done(cache.swap_in(ONE, len(TOKENS))) == kept
    assert_content_of_prefix(cache, kept)


@pytest.mark.parametrize("page", range(4))
def test_a_failed_read_truncates_the_sequence(
    new: Callable[..., KVCache], tmp_path: Path, page: int
):
    disk = DiskStore(LAYOUT, 8, tmp_path)
    cache = new(disk)
    sequence(cache, ONE, TOKENS)
    done(cache.swap_out(ONE))
    os.pwrite(disk.fd, b"\x66\x66", page * LAYOUT.page_bytes + 20)
    kept = page * SIZE
    assert done(cache.swap_in(ONE, len(TOKENS))) == kept
    assert_content_of_prefix(cache, kept)


def assert_content_of_prefix(cache: KVCache, kept: int) -> None:
    """The remaining KV of `ONE` is right, and the rest can be computed again."""
    assert cache.length(ONE) == kept
    compute(cache, ONE, TOKENS[kept:])
    assert_content_of(cache, ONE, TOKENS)
    cache.remove_sequence(ONE)


def test_shared_pages_stay_for_the_other_sequences(cache: KVCache):
    cache.fork_sequence(ONE, SeqId(2), 2 * SIZE)
    done(cache.swap_out(ONE))
    assert cache.page_use().active == 2
    assert_content_of(cache, SeqId(2), TOKENS[: 2 * SIZE])
    done(cache.swap_in(ONE))
    assert_content_of(cache, ONE, TOKENS)
    for seq_id in (ONE, SeqId(2)):
        cache.remove_sequence(seq_id)


def test_an_empty_sequence_can_be_swapped_out(cache: KVCache):
    cache.add_sequence(SeqId(2))
    assert done(cache.swap_out(SeqId(2))) == 0
    assert done(cache.swap_in(SeqId(2), 3)) == 0
    for seq_id in (ONE, SeqId(2)):
        cache.remove_sequence(seq_id)


def test_a_sequence_that_is_sent_stays(cache: KVCache):
    sequence_ = cache._sequences[ONE]
    sequence_.send = SendRange(1, 0, 1)
    with pytest.raises(Internal, match="sent"):
        cache.swap_out(ONE)
    cache.clear_mark(ONE)
    cache.remove_sequence(ONE)


def test_without_tiers_there_is_no_room(new: Callable[..., KVCache]):
    cache = new()
    sequence(cache, ONE, TOKENS)
    with pytest.raises(NoCapacity):
        cache.swap_out(ONE)
    assert_content_of(cache, ONE, TOKENS)
    cache.remove_sequence(ONE)


@pytest.mark.parametrize("direction", ["out", "in"])
def test_closing_ends_a_swap_with_the_copied_pages(store: GatedStore, direction: str):
    cache = tiered(store)
    sequence(cache, ONE, TOKENS)
    if direction == "out":
        store.gate.shut()
        future = cache.swap_out(ONE)
    else:
        done(cache.swap_out(ONE))
        store.gate.shut()
        future = cache.swap_in(ONE)
    store.gate.one()
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(cache.close)
        threading.Event().wait(0.02)
        store.gate.open()
        closing.result(PATIENCE_S)
    assert done(future) == SIZE
    cache.check_integrity()
    if direction == "in":
        assert cache.length(ONE) == SIZE
    cache.remove_sequence(ONE)
    at_rest(cache)


def test_after_closing_nothing_is_swapped_in(store: GatedStore):
    cache = tiered(store)
    sequence(cache, ONE, TOKENS)
    done(cache.swap_out(ONE))
    cache.close()
    assert done(cache.swap_in(ONE)) == 0
    cache.remove_sequence(ONE)
    at_rest(cache)


def test_the_bytes_of_swaps_are_counted(cache: KVCache):
    (tier,) = cache.tiers
    done(cache.swap_out(ONE))
    assert (tier.stats.bytes_in, tier.stats.bytes_out) == (4 * LAYOUT.page_bytes, 0)
    done(cache.swap_in(ONE))
    assert (tier.stats.bytes_in, tier.stats.bytes_out) == (4 * LAYOUT.page_bytes,) * 2
    cache.remove_sequence(ONE)


def test_swaps_are_made_in_their_order(cache: KVCache, store: GatedStore):
    order: list[str] = []
    two = sequence(cache, 2, [8] * (2 * SIZE))
    store.gate.shut()
    for seq_id, name in ((ONE, "first"), (two, "second")):
        future = cache.swap_out(seq_id)
        future.add_done_callback(lambda _, name=name: order.append(name))
        store.gate.one()
    store.gate.open()
    quiet(cache)
    assert order == ["first", "second"]
    for seq_id in (ONE, two):
        cache.remove_sequence(seq_id)


def test_closing_ends_all_swaps(store: GatedStore):
    cache = tiered(store)
    sequence(cache, ONE, TOKENS)
    two = sequence(cache, 2, [8] * (2 * SIZE))
    store.gate.shut()
    first, second = cache.swap_out(ONE), cache.swap_out(two)
    store.gate.one()
    close_in_mid_copy(cache, store)
    assert (done(first), done(second)) == (SIZE, 0)
    for seq_id in (ONE, two):
        cache.remove_sequence(seq_id)
    at_rest(cache)


def test_a_swap_says_whether_it_is_being_copied(cache: KVCache, store: GatedStore):
    store.gate.shut()
    future = cache.swap_out(ONE)
    (swap,) = cache.tiers._swaps
    assert swap.moving and swap.slots == []
    with pytest.raises(Internal, match="being copied"):
        swap.copy_in([], lambda pages, length: None)
    store.gate.open()
    done(future)
    assert not swap.moving and len(swap.slots) == 4 and swap.length == len(TOKENS)
    future = cache.swap_in(ONE)
    assert swap.slots == []
    done(future)
    assert not swap.moving and not cache.tiers._swaps
    cache.remove_sequence(ONE)


def test_a_swap_that_is_abandoned_has_no_slots(cache: KVCache):
    done(cache.swap_out(ONE))
    (swap,) = cache.tiers._swaps
    cache.remove_sequence(ONE)
    assert swap.slots == [] and not cache.tiers._swaps
