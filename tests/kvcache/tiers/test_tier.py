"""Write-behind and promotion of prefixes, at every interleaving."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from gated_store import PATIENCE_S, GatedStore, close_in_mid_copy
from kv_helpers import SIZE, assert_content, cached, compute, sequence, small_layout
from tier_helpers import at_rest, quiet, tiered, tiered_caches

from kvcache.cache import KVCache
from kvcache.errors import Internal, NoCapacity
from kvcache.tiers.disk_store import DiskStore
from kvcache.tiers.move import Move
from kvcache.tiers.store import HostStore
from kvcache.tiers.tier import MAX_OFFERS
from kvcache.types import PageId, SeqId

LAYOUT = small_layout(1)
PROMPT = list(range(100, 100 + 4 * SIZE))
OTHER = list(range(500, 500 + 8 * SIZE))


@pytest.fixture
def store() -> GatedStore:
    return GatedStore(LAYOUT, 16)


@pytest.fixture
def new() -> Iterator[Callable[..., KVCache]]:
    with tiered_caches() as make:
        yield make


@pytest.fixture
def cache(new: Callable[..., KVCache], store: GatedStore) -> KVCache:
    return new(store)


def evict_all(cache: KVCache) -> None:
    """Take all pages of the device for a moment."""
    cache.add_sequence(SeqId(10**9))
    cache.grow(SeqId(10**9), cache.page_use().total * SIZE)
    cache.remove_sequence(SeqId(10**9))
    assert cache.prefix_tokens == 0


def promoted(future: Future[int] | None) -> int:
    assert future is not None
    return future.result(PATIENCE_S)


def evicted(cache: KVCache, tokens: list[int] = PROMPT) -> None:
    """Put `tokens` into tiers only."""
    cached(cache, 1, tokens)
    quiet(cache)
    evict_all(cache)


def hold_pages_behind_cached_ones(cache: KVCache) -> None:
    """Have sequence 2 hold the page after two cached ones that no sequence holds."""
    prompt = OTHER[: 3 * SIZE]
    for number in (1, 2):  # both compute the first two pages, and each has its own
        cache.add_sequence(SeqId(number), prompt)
    compute(cache, SeqId(1), prompt[: 2 * SIZE])
    compute(cache, SeqId(2), prompt)
    cache.publish(SeqId(1), prompt[: 2 * SIZE])
    cache.publish(SeqId(2), prompt)
    cache.remove_sequence(SeqId(1))
    quiet(cache)


def test_a_prefix_is_promoted(cache: KVCache):
    evicted(cache)
    assert promoted(cache.promote([*PROMPT, 1, 2])) == len(PROMPT)
    seq_id = sequence(cache, 2, PROMPT)
    assert_content(cache, seq_id, PROMPT)
    cache.remove_sequence(seq_id)
    (tier,) = cache.tiers
    assert (tier.stats.promoted_tokens, tier.stats.failures) == (len(PROMPT), 0)
    assert tier.stats.bytes_in == tier.stats.bytes_out == 4 * LAYOUT.page_bytes


def test_only_what_is_missing_is_copied(cache: KVCache):
    cached(cache, 1, PROMPT[: 2 * SIZE])
    cached(cache, 2, PROMPT)
    quiet(cache)
    cached(cache, 3, PROMPT)
    quiet(cache)
    assert not cache.bookkeeping.pages.pool._readers  # the copies have ended
    (tier,) = cache.tiers
    assert tier.stats.bytes_in == 4 * LAYOUT.page_bytes
    evict_all(cache)
    assert promoted(cache.promote(PROMPT[: 1 * SIZE])) == SIZE
    assert promoted(cache.promote(PROMPT)) == 3 * SIZE
    assert cache.promote(PROMPT) is None
    seq_id = sequence(cache, 4, PROMPT)
    assert_content(cache, seq_id, PROMPT)
    cache.remove_sequence(seq_id)


def test_an_unknown_prefix_promotes_nothing(cache: KVCache):
    assert cache.promote(PROMPT) is None
    evicted(cache)
    assert cache.promote([7, *PROMPT]) is None
    assert cache.promote(PROMPT[: SIZE - 1]) is None


def test_a_committed_prefix_is_copied_to_the_tier(new: Callable[..., KVCache], store: GatedStore):
    """KV that a peer put is treated like KV that was computed here."""
    cache = new(store, pages=16)
    lease, _ = cache.prep_recv("r", PROMPT, 0, 0, 10.0)
    assert cache.commit(lease.lease_id) == 0
    evicted(cache)
    assert promoted(cache.promote(PROMPT)) == len(PROMPT)
    lease, _ = cache.prep_recv("r", PROMPT, len(PROMPT), 0, 10.0)
    assert lease.begin == len(PROMPT)
    cache.commit(lease.lease_id)


def test_promoted_pages_are_cached_only_once_copied(cache: KVCache, store: GatedStore):
    evicted(cache)
    store.gate.shut()
    future = cache.promote(PROMPT)
    store.gate.one()
    assert cache.prefix_tokens == 0
    assert cache.add_sequence(SeqId(5), PROMPT) == 0
    cache.check_integrity()
    assert cache.tiers.use()[0].copying == 4
    store.gate.open()
    assert promoted(future) == len(PROMPT)
    assert cache.prefix_tokens == len(PROMPT)
    cache.remove_sequence(SeqId(5))


def test_two_promotions_of_one_prefix_share_a_copy(cache: KVCache, store: GatedStore):
    evicted(cache)
    store.gate.shut()
    first = cache.promote(PROMPT)
    assert cache.promote(PROMPT) is first
    store.gate.open()
    assert promoted(first) == len(PROMPT)


def test_a_cancelled_caller_does_not_stop_the_copy(cache: KVCache, store: GatedStore):
    evicted(cache)
    store.gate.shut()
    future = cache.promote(PROMPT)
    assert future is not None and not future.cancel()
    store.gate.open()
    assert promoted(future) == len(PROMPT)


def test_pages_computed_during_a_promotion_are_kept(cache: KVCache, store: GatedStore):
    evicted(cache)
    store.gate.shut()
    future = cache.promote(PROMPT)
    store.gate.one()
    cached(cache, 5, PROMPT)
    store.gate.open()
    promoted(future)
    quiet(cache)
    seq_id = sequence(cache, 6, PROMPT)
    assert_content(cache, seq_id, PROMPT)
    cache.remove_sequence(seq_id)


def test_running_sequences_keep_a_page_to_grow_into(cache: KVCache):
    evicted(cache)
    cache.add_sequence(SeqId(5))
    cache.grow(SeqId(5), 7 * SIZE)
    assert cache.promote(PROMPT) is None
    cache.pop(SeqId(5), 0)
    cache.remove_sequence(SeqId(5))
    cache.add_sequence(SeqId(5))
    cache.grow(SeqId(5), 5 * SIZE)
    assert promoted(cache.promote(PROMPT)) == 2 * SIZE  # as much as there is room for
    cache.grow(SeqId(5), 6 * SIZE)
    cache.remove_sequence(SeqId(5))


def test_a_promotion_with_less_room_than_estimated_leaves_nothing(cache: KVCache):
    """A cached page that no sequence holds stays while a sequence holds the page after it."""
    evicted(cache)
    hold_pages_behind_cached_ones(cache)
    assert cache.available == 5  # of which 3 can be had
    assert cache.promote(PROMPT) is None
    cache.check_integrity()
    cache.remove_sequence(SeqId(2))
    assert promoted(cache.promote(PROMPT)) == len(PROMPT)


def test_pages_under_promotion_are_not_given_away(cache: KVCache, store: GatedStore):
    evicted(cache)
    store.gate.shut()
    future = cache.promote(PROMPT)
    store.gate.one()
    cache.add_sequence(SeqId(5))
    with pytest.raises(NoCapacity):
        cache.grow(SeqId(5), 5 * SIZE)
    cache.grow(SeqId(5), 4 * SIZE)
    cache.check_integrity()
    store.gate.open()
    assert promoted(future) == len(PROMPT)
    cache.remove_sequence(SeqId(5))


def test_pages_that_wait_to_be_copied_can_be_evicted(cache: KVCache, store: GatedStore):
    """They count as cached, and are not copied after their eviction."""
    store.gate.shut()
    cached(cache, 1, PROMPT)
    store.gate.one()
    use = cache.page_use()
    assert (use.free, use.cached, cache.available) == (4, 4, 8)
    cache.add_sequence(SeqId(2))
    cache.grow(SeqId(2), 7 * SIZE)  # all but the page that is being copied
    cache.check_integrity()
    store.gate.open()
    quiet(cache)
    cache.remove_sequence(SeqId(2))
    evict_all(cache)
    assert promoted(cache.promote(PROMPT)) == SIZE


def test_freeing_a_page_under_copy_waits_for_the_copy(cache: KVCache, store: GatedStore):
    store.gate.shut()
    cached(cache, 1, PROMPT)
    store.gate.one()
    cache.add_sequence(SeqId(2))
    assert cache.available == 8
    with ThreadPoolExecutor(1) as pool:
        growing = pool.submit(cache.grow, SeqId(2), 8 * SIZE)
        threading.Event().wait(0.05)
        assert not growing.done()
        store.gate.open()
        growing.result(PATIENCE_S)
    cache.remove_sequence(SeqId(2))
    quiet(cache)
    assert promoted(cache.promote(PROMPT)) == SIZE  # it was read before it went
    seq_id = sequence(cache, 3, PROMPT[:SIZE])
    assert_content(cache, seq_id, PROMPT[:SIZE])
    cache.remove_sequence(seq_id)


def test_a_full_tier_evicts_the_least_recently_used(new: Callable[..., KVCache]):
    cache = new(HostStore(LAYOUT, 20), pages=16)
    prompts = [[1000 * n + i for i in range(4 * SIZE)] for n in range(6)]
    for number, prompt in enumerate(prompts):
        evicted(cache, prompt)
        if number:
            assert promoted(cache.promote(prompts[0])) == 4 * SIZE  # used again and again
            evict_all(cache)
    assert promoted(cache.promote(prompts[0])) == 4 * SIZE
    assert promoted(cache.promote(prompts[5])) == 4 * SIZE
    assert cache.promote(prompts[1]) is None


def test_a_prompt_that_does_not_fit_is_kept_in_part(new: Callable[..., KVCache]):
    cache = new(HostStore(LAYOUT, 3))
    evicted(cache)
    assert promoted(cache.promote(PROMPT)) == 3 * SIZE
    (tier,) = cache.tiers
    assert tier.stats.skipped > 0


def test_too_many_prefixes_at_once_are_not_all_copied(cache: KVCache, store: GatedStore):
    store.gate.shut()
    (tier,) = cache.tiers
    for number in range(MAX_OFFERS + 10):
        cached(cache, 1, [number % 3] * SIZE)
    assert tier.stats.skipped >= 9
    cached(cache, 1, PROMPT)
    store.gate.open()
    quiet(cache)
    evict_all(cache)
    assert promoted(cache.promote(PROMPT)) == len(PROMPT)


def test_a_page_that_cannot_be_written_is_not_cached(cache: KVCache, store: GatedStore):
    store.fail_at = 2
    evicted(cache)
    assert promoted(cache.promote(PROMPT)) == 2 * SIZE
    (tier,) = cache.tiers
    assert tier.stats.failures == 1


def test_a_page_that_cannot_be_read_is_a_miss_and_forgotten(cache: KVCache, store: GatedStore):
    evicted(cache)
    store.fail_at = 1
    assert promoted(cache.promote(PROMPT)) == SIZE
    assert cache.promote(PROMPT) is None
    seq_id = sequence(cache, 2, PROMPT)
    assert_content(cache, seq_id, PROMPT)
    cache.publish(seq_id, PROMPT)  # and learnt again
    cache.remove_sequence(seq_id)
    quiet(cache)
    evict_all(cache)
    assert promoted(cache.promote(PROMPT)) == len(PROMPT)


def test_a_damaged_file_is_a_miss_and_never_other_kv(new: Callable[..., KVCache], tmp_path: Path):
    disk = DiskStore(LAYOUT, 16, tmp_path)
    cache = new(disk)
    evicted(cache)
    os.pwrite(disk.fd, b"\x77", 2 * LAYOUT.page_bytes + 99)
    assert promoted(cache.promote(PROMPT)) == 2 * SIZE
    seq_id = sequence(cache, 2, PROMPT)
    assert_content(cache, seq_id, PROMPT)
    cache.remove_sequence(seq_id)


def test_the_disk_keeps_prefixes_that_the_host_evicted(new: Callable[..., KVCache], tmp_path: Path):
    cache = new(HostStore(LAYOUT, 8), DiskStore(LAYOUT, 32, tmp_path))
    host, disk = cache.tiers
    evicted(cache)
    evicted(cache, OTHER)  # takes all of the host's slots
    assert host.manager.prefix.match(PROMPT) == []
    assert promoted(cache.promote(PROMPT)) == len(PROMPT)
    assert disk.stats.promoted_tokens == len(PROMPT)
    quiet(cache)
    assert len(host.manager.prefix.match(PROMPT)) == 4  # it is copied behind again
    seq_id = sequence(cache, 2, PROMPT)
    assert_content(cache, seq_id, PROMPT)
    cache.remove_sequence(seq_id)


def test_a_slot_that_the_disk_reads_is_not_freed(new: Callable[..., KVCache], tmp_path: Path):
    """The same guarantees hold for the tier above as for the device."""

    class Slow(DiskStore):
        def buffer(self, slot):  # type: ignore[no-untyped-def]
            gate.pass_()
            return super().buffer(slot)

    gate = GatedStore(LAYOUT, 1).gate
    cache = new(HostStore(LAYOUT, 4), Slow(LAYOUT, 32, tmp_path))
    gate.shut()
    cached(cache, 1, PROMPT)
    gate.one()
    with ThreadPoolExecutor(1) as pool:
        # The host must evict for it what the disk reads, and holds the lock while it waits.
        second = pool.submit(cached, cache, 2, OTHER[: 4 * SIZE])
        threading.Event().wait(0.05)
        gate.open()
        second.result(PATIENCE_S)
    quiet(cache)
    evict_all(cache)
    assert promoted(cache.promote(PROMPT)) >= SIZE
    seq_id = sequence(cache, 2, PROMPT)
    assert_content(cache, seq_id, PROMPT)
    cache.remove_sequence(seq_id)


def test_many_threads_at_once(new: Callable[..., KVCache], tmp_path: Path):
    """Prompts alternate in a pool that is too small for two of them."""
    cache = new(HostStore(LAYOUT, 12), DiskStore(LAYOUT, 40, tmp_path), pages=9)
    prompts = [[1000 * n + i for i in range(4 * SIZE)] for n in range(5)]

    def work(worker: int) -> int:
        hits = 0
        for turn in range(30):
            prompt = prompts[(worker + turn) % len(prompts)]
            future = cache.promote(prompt)
            if future is not None:
                hits += promoted(future)
            seq_id = SeqId(1000 * worker + turn)
            with cache.lock:  # a step computes one sequence of these at a time
                try:
                    sequence(cache, seq_id, prompt)
                except NoCapacity:
                    cache.remove_sequence(seq_id)
                    continue
                assert_content(cache, seq_id, prompt)
                cache.publish(seq_id, prompt)
            cache.remove_sequence(seq_id)
        return hits

    with ThreadPoolExecutor(2) as pool:
        assert sum(pool.map(work, range(2))) > 0


def test_closing_ends_the_copies(store: GatedStore):
    cache = tiered(store)
    evicted(cache)
    store.gate.shut()
    future = cache.promote(PROMPT)
    store.gate.one()
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(cache.close)
        threading.Event().wait(0.02)
        assert not closing.done()
        store.gate.open()
        closing.result(PATIENCE_S)
    assert promoted(future) == SIZE  # what was copied by then
    at_rest(cache)
    cached(cache, 5, OTHER)  # nobody copies it
    future = cache.promote(PROMPT)
    assert future is None or promoted(future) == 0
    at_rest(cache)
    assert not any("tier" in thread.name for thread in threading.enumerate())


def test_an_exception_in_one_copy_does_not_end_the_others(
    cache: KVCache, monkeypatch: pytest.MonkeyPatch
):
    (tier,) = cache.tiers
    usual = tier.manager.prefix.match

    def fails_once(*_: object, **__: object) -> None:
        monkeypatch.setattr(tier.manager.prefix, "match", usual)
        raise RuntimeError("a defect")

    monkeypatch.setattr(tier.manager.prefix, "match", fails_once)
    cached(cache, 1, OTHER[:SIZE])
    quiet(cache)
    evicted(cache)
    assert promoted(cache.promote(PROMPT)) == len(PROMPT)


def test_a_tier_closes_before_the_one_that_it_reads(monkeypatch: pytest.MonkeyPatch):
    closed: list[str] = []
    stores = [HostStore(LAYOUT, 4), HostStore(LAYOUT, 8)]
    for store, name in zip(stores, ("upper", "lower"), strict=True):
        monkeypatch.setattr(store, "close", lambda name=name: closed.append(name))
    tiered(*stores).close()
    assert closed == ["lower", "upper"]


def test_a_prefix_longer_than_a_tier_fills_it(new: Callable[..., KVCache]):
    cache = new(HostStore(LAYOUT, 3), pages=12)
    cached(cache, 1, PROMPT)
    quiet(cache)
    cached(cache, 2, OTHER)
    quiet(cache)  # it evicts what is in its way, but not the pages before the one it copies
    assert cache.tiers.use()[0].cached == 3
    evict_all(cache)
    assert promoted(cache.promote(OTHER)) == 3 * SIZE


def test_a_store_whose_records_cannot_be_read_starts_empty(
    store: GatedStore, new: Callable[..., KVCache], monkeypatch: pytest.MonkeyPatch
):
    def fail() -> None:
        raise OSError(5, "broken")

    monkeypatch.setattr(store, "load_prefixes", fail)
    cache = new(store)
    evicted(cache)
    assert promoted(cache.promote(PROMPT)) == len(PROMPT)


def test_a_defect_in_one_copy_loses_its_page_only(
    cache: KVCache, store: GatedStore, monkeypatch: pytest.MonkeyPatch
):
    """Any exception counts as a page that cannot be copied, such as one of the device."""
    usual = store.buffer

    def fails_once(slot: PageId) -> torch.Tensor:
        monkeypatch.setattr(store, "buffer", usual)
        raise RuntimeError("the device has failed")

    monkeypatch.setattr(store, "buffer", fails_once)
    evicted(cache)
    (tier,) = cache.tiers
    assert (tier.stats.failures, cache.promote(PROMPT)) == (1, None)
    evicted(cache)
    assert promoted(cache.promote(PROMPT)) == len(PROMPT)


def test_a_move_that_cannot_be_finished_fails_alone(
    cache: KVCache, caplog: pytest.LogCaptureFixture
):
    (tier,) = cache.tiers

    def finish(move: Move) -> int:
        raise RuntimeError("a defect")

    move = Move(True, [], [], 0, finish)
    tier.move(move)
    assert isinstance(move.ended.exception(PATIENCE_S), RuntimeError)
    assert "failed to finish" in caplog.text
    evicted(cache)
    assert promoted(cache.promote(PROMPT)) == len(PROMPT)


def test_without_tiers_nothing_is_promoted(new: Callable[..., KVCache]):
    assert new().promote(PROMPT) is None


def test_the_fastest_tier_with_most_of_a_prefix_is_read(
    new: Callable[..., KVCache], tmp_path: Path
):
    cache = new(HostStore(LAYOUT, 16), DiskStore(LAYOUT, 32, tmp_path))
    evicted(cache)
    assert [tier.cached for tier in cache.tiers.use()] == [4, 4]
    assert promoted(cache.promote(PROMPT)) == len(PROMPT)
    host, disk = cache.tiers
    assert (host.stats.promoted_tokens, disk.stats.promoted_tokens) == (len(PROMPT), 0)
    assert (host.persistent, disk.persistent, cache.persistent) == (False, False, False)


def test_a_tier_with_less_than_the_device_is_not_read(new: Callable[..., KVCache]):
    cache = new(HostStore(LAYOUT, 2))
    cached(cache, 1, PROMPT)
    quiet(cache)
    assert cache.tiers.use()[0].cached == 2
    assert cache.promote(PROMPT) is None


def test_a_single_page_is_promoted_where_there_is_room_for_one(cache: KVCache):
    evicted(cache)
    cache.add_sequence(SeqId(5))
    cache.grow(SeqId(5), 6 * SIZE)  # of the two other pages it keeps one to grow into
    assert promoted(cache.promote(PROMPT)) == SIZE
    cache.remove_sequence(SeqId(5))


def test_a_prefix_that_was_evicted_again_is_promoted_again(cache: KVCache):
    evicted(cache)
    for _ in range(3):
        assert cache.prefix_tokens == 0
        assert promoted(cache.promote(PROMPT)) == len(PROMPT)
        assert cache.prefix_tokens == len(PROMPT)
        evict_all(cache)
    (tier,) = cache.tiers
    assert tier.stats.promoted_tokens == 3 * len(PROMPT)
    assert tier.stats.bytes_out == 3 * 4 * LAYOUT.page_bytes
    assert tier._thread.daemon  # a process that fails must be able to end


def test_the_slot_that_is_filled_counts_as_copying(cache: KVCache, store: GatedStore):
    store.gate.shut()
    cached(cache, 1, PROMPT)
    store.gate.one()
    (use,) = cache.tiers.use()
    assert (use.total, use.free, use.cached, use.swapped, use.copying) == (16, 15, 0, 0, 1)
    cache.check_integrity()
    store.gate.open()
    quiet(cache)
    (use,) = cache.tiers.use()
    assert (use.total, use.free, use.cached, use.swapped, use.copying) == (16, 12, 4, 0, 0)


def test_write_behind_is_no_use_of_a_prefix(cache: KVCache, store: GatedStore):
    """Of two prefixes that the device evicts from, the one that no request has used goes first."""
    first, second = OTHER[: 2 * SIZE], PROMPT[: 2 * SIZE]
    store.gate.shut()
    cached(cache, 1, first)
    store.gate.one()
    cached(cache, 2, second)
    cache.remove_sequence(sequence(cache, 3, first))
    store.gate.open()
    quiet(cache)  # the second was copied last
    cache.add_sequence(SeqId(4))
    cache.grow(SeqId(4), 5 * SIZE)  # one page more than are free
    prefix = cache.bookkeeping.pages.prefix
    assert [len(prefix.match(each, use=False)) for each in (first, second)] == [2, 1]
    cache.remove_sequence(SeqId(4))


def test_a_bounded_number_of_prefixes_wait(cache: KVCache, store: GatedStore):
    store.gate.shut()
    cached(cache, 1, PROMPT)
    store.gate.one()
    (tier,) = cache.tiers
    for number in range(300):
        tier.offer([number] * SIZE)
    assert len(tier._offers) == 256 and tier.stats.skipped == 44
    assert tier._offers[0][0] == 44  # the oldest have gone
    store.gate.open()
    quiet(cache)


def test_closing_drops_the_prefixes_that_wait(store: GatedStore):
    cache = tiered(store)
    store.gate.shut()
    cached(cache, 1, PROMPT)
    store.gate.one()
    cached(cache, 2, OTHER[:SIZE])
    tier = close_in_mid_copy(cache, store)
    assert not tier._offers and len(store.filled) == 1  # the page that was being copied
    assert cache.tiers.use()[0].cached == 1
    cache.check_integrity()


def test_a_promotion_without_room_leaves_what_is_on_the_device(cache: KVCache):
    evicted(cache)
    assert promoted(cache.promote(PROMPT[:SIZE])) == SIZE
    cache.add_sequence(SeqId(5))
    cache.grow(SeqId(5), 6 * SIZE)  # the last page is for it to grow into
    assert cache.promote(PROMPT) is None
    cache.check_integrity()
    cache.remove_sequence(SeqId(5))
    hold_pages_behind_cached_ones(cache)
    assert cache.promote(PROMPT) is None  # less can be had than seems available
    cache.check_integrity()
    cache.remove_sequence(SeqId(2))


def test_the_integrity_of_every_tier_is_checked(tmp_path: Path):
    cache = tiered(HostStore(LAYOUT, 4), DiskStore(LAYOUT, 8, tmp_path))
    for tier in cache.tiers:
        lost = tier.manager.take(1)
        with pytest.raises(Internal):
            cache.check_integrity()
        tier.manager.drop(lost)
        cache.check_integrity()
    cache.close()
