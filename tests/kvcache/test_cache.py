"""The cache's sequences, leases and sends, over the memory transport."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from kv_helpers import (
    DIM,
    HEADS,
    KV_HEADS,
    SIZE,
    assert_content,
    cached,
    compute,
    make_cache,
    memory_cache,
    pages_of,
    send,
    sequence,
    small_layout,
)

from kvcache.cache import KVCache
from kvcache.errors import (
    BadRange,
    BadRequest,
    Internal,
    KVIncomplete,
    LeaseExpired,
    NoCapacity,
    UnknownLease,
)
from kvcache.pages.page_pool import SCRATCH_PAGE
from kvcache.transport import MemoryNetwork, MemoryTransport
from kvcache.types import LeaseId, SeqId

NewCache = Callable[..., KVCache]
ONE, TWO = SeqId(1), SeqId(2)
PROMPT = list(range(100, 122))  # five full pages and a half


def test_a_page_size_that_does_not_divide_the_block_is_refused():
    layout = small_layout(4, page_size=48)
    with pytest.raises(BadRequest):
        make_cache(MemoryTransport(MemoryNetwork(), 1), layout)


# Sequences


def test_what_is_computed_stands_in_the_pages(cache: KVCache):
    assert_content(cache, sequence(cache, 1, PROMPT), PROMPT)


def test_a_removed_sequence_frees_its_pages(cache: KVCache):
    cache.remove_sequence(sequence(cache, 1, PROMPT))
    assert cache.page_use().free == cache.page_use().total


def test_published_pages_are_found_again(cache: KVCache):
    cached(cache, 1, PROMPT)
    assert cache.prefix_tokens == 20
    assert cache.add_sequence(TWO, PROMPT) == 20
    compute(cache, TWO, PROMPT[20:])
    assert_content(cache, TWO, PROMPT)


def test_only_what_is_present_is_published(cache: KVCache):
    seq = sequence(cache, 1, PROMPT[:6])
    cache.grow(seq, 22)
    cache.publish(seq, PROMPT)
    assert cache.prefix_tokens == 4


def test_growth_that_fails_changes_nothing(cache: KVCache):
    seq = sequence(cache, 1, PROMPT)
    before = pages_of(cache, seq)
    with pytest.raises(NoCapacity):
        cache.grow(seq, 33 * SIZE)
    assert pages_of(cache, seq) == before
    cache.grow(seq, 32 * SIZE)
    cache.grow(seq, 1)  # never shrinks
    assert len(pages_of(cache, seq)) == 32


def test_growth_that_fails_evicts_nothing(cache: KVCache):
    """Who waits for room asks again and again; the others' prefixes are not to pay for it."""
    cached(cache, 1, PROMPT)
    sequence(cache, 2, range(1000, 1000 + 8 * SIZE))
    cache.add_sequence(SeqId(3))
    with pytest.raises(NoCapacity):
        cache.grow(SeqId(3), 25 * SIZE)
    assert cache.prefix_tokens == 20
    cache.grow(SeqId(3), 24 * SIZE)
    assert cache.prefix_tokens == 0


def test_growth_evicts_what_nobody_uses(cache: KVCache):
    cached(cache, 1, PROMPT)
    sequence(cache, 2, range(31 * SIZE))
    assert cache.prefix_tokens == 4
    cache.check_integrity()


def test_a_fork_shares_full_pages_and_copies_the_rest(cache: KVCache):
    parent = sequence(cache, 1, PROMPT)
    cache.fork_sequence(parent, TWO, 10)
    assert pages_of(cache, TWO)[:2] == pages_of(cache, parent)[:2]
    assert pages_of(cache, TWO)[2] != pages_of(cache, parent)[2]
    compute(cache, TWO, [7, 8, 9])
    assert_content(cache, TWO, [*PROMPT[:10], 7, 8, 9])
    assert_content(cache, parent, PROMPT)


def test_a_fork_outlives_its_parent(cache: KVCache):
    parent = sequence(cache, 1, PROMPT)
    cache.fork_sequence(parent, TWO, 8)
    cache.remove_sequence(parent)
    sequence(cache, 3, range(28 * SIZE))
    assert_content(cache, TWO, PROMPT[:8])


@pytest.mark.parametrize("length", [-1, 23])
def test_a_fork_beyond_the_parent_is_refused(cache: KVCache, length: int):
    parent = sequence(cache, 1, PROMPT)
    with pytest.raises(BadRange):
        cache.fork_sequence(parent, TWO, length)


def test_a_fork_without_room_takes_nothing(cache: KVCache):
    parent = sequence(cache, 1, range(31 * SIZE + 1))
    with pytest.raises(NoCapacity):
        cache.fork_sequence(parent, TWO, 5)
    cache.check_integrity()


def test_pop_frees_the_pages_it_empties(cache: KVCache):
    seq = sequence(cache, 1, PROMPT)
    cache.pop(seq, 13)
    assert len(pages_of(cache, seq)) == 3
    compute(cache, seq, [1, 2])
    assert_content(cache, seq, [*PROMPT[:9], 1, 2])
    cache.pop(seq, 11)
    assert pages_of(cache, seq) == []


def test_pop_into_a_shared_page_is_refused(cache: KVCache):
    seq = sequence(cache, 1, PROMPT)
    cache.publish(seq, PROMPT)
    with pytest.raises(BadRange, match="shared"):
        cache.pop(seq, 4)
    cache.pop(seq, 2)  # to a border, which leaves the shared pages alone
    compute(cache, seq, [1])
    assert_content(cache, seq, [*PROMPT[:20], 1])


@pytest.mark.parametrize("count", [-1, 23])
def test_pop_of_more_than_there_is_is_refused(cache: KVCache, count: int):
    with pytest.raises(BadRange):
        cache.pop(sequence(cache, 1, PROMPT), count)


def test_a_sequence_id_is_used_once(cache: KVCache):
    seq = sequence(cache, 1, PROMPT)
    cache.publish(seq, PROMPT)
    lease, _ = cache.prep_recv("r", PROMPT, 20, 0, 1.0)
    with pytest.raises(Internal):
        cache.add_sequence(seq, PROMPT)
    with pytest.raises(Internal):
        cache.fork_sequence(seq, seq, 10)
    with pytest.raises(Internal):
        cache.start_lease(lease.lease_id, seq, PROMPT, None)
    cache.check_integrity()  # none of them holds on to a page


# Steps


def test_a_step_needs_room(cache: KVCache):
    cache.add_sequence(ONE)
    with pytest.raises(Internal, match="room"):
        cache.begin_forward([ONE], [1])


def test_attention_needs_a_step(cache: KVCache):
    q, kv = torch.zeros(1, HEADS, DIM), torch.zeros(1, KV_HEADS, DIM)
    with pytest.raises(Internal):
        cache.attention(0, q, kv, kv)
    with pytest.raises(Internal):
        cache.end_forward()


def test_an_aborted_step_leaves_no_tokens(cache: KVCache):
    seq = sequence(cache, 1, PROMPT[:5])
    cache.grow(seq, 9)
    cache.begin_forward([seq], [4])
    cache.abort_forward()
    assert cache.length(seq) == 5
    compute(cache, seq, PROMPT[5:])
    assert_content(cache, seq, PROMPT)


def test_padding_rows_write_nothing_and_are_zero(cache: KVCache):
    cache.add_sequence(ONE)
    cache.grow(ONE, 1)
    cache.begin_forward([ONE], [1])
    ones = torch.ones(4, KV_HEADS, DIM)
    out = cache.attention(0, torch.ones(4, HEADS, DIM), ones, ones)
    cache.end_forward()
    assert out[0].count_nonzero() and not out[1:].count_nonzero()
    assert not cache.store.pool[:, SCRATCH_PAGE].count_nonzero()
    assert int(cache.store.pool[0].count_nonzero()) == 2 * KV_HEADS * DIM


def test_integrity_notices_a_written_scratch_page():
    cache = memory_cache(MemoryNetwork())
    cache.store.pool[0, SCRATCH_PAGE, 0, 0] = torch.nan
    with pytest.raises(Internal, match="scratch"):
        cache.check_integrity()
    cache.close()


# Receiving


def test_what_was_put_is_what_the_sender_has(pair: tuple[KVCache, KVCache]):
    sender, receiver = pair
    lease, address = receiver.prep_recv("r", PROMPT, 21, 3, 10.0)
    assert (lease.begin, lease.end) == (0, 21)
    send(sender, address, PROMPT, 0, 21)
    assert receiver.lease(lease.lease_id).state == "landed"
    assert receiver.start_lease(lease.lease_id, ONE, PROMPT, None) == 21
    compute(receiver, ONE, PROMPT[21:])
    assert_content(receiver, ONE, PROMPT)


@pytest.mark.parametrize("here", [0, 4, 7, 9, 16])
@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_any_mix_of_cached_and_computed_lands(new_cache: NewCache, here: int, chunk: int):
    sender, receiver = new_cache(name="sender"), new_cache(name="receiver")
    cached(sender, 1, PROMPT[:here])
    cached(receiver, 1, PROMPT[:8])
    lease, address = receiver.prep_recv("r", PROMPT, 19, 0, 10.0)
    assert lease.begin == 8
    send(sender, address, PROMPT, 8, 19, chunk)
    receiver.start_lease(lease.lease_id, ONE, PROMPT, 19)
    assert_content(receiver, ONE, PROMPT[:19])


def test_an_empty_lease_has_landed(cache: KVCache):
    lease, _ = cache.prep_recv("r", PROMPT, 0, 0, 10.0)
    assert lease.state == "landed"
    assert cache.start_lease(lease.lease_id, ONE, PROMPT, None) == 0


def test_a_lease_for_what_is_here_has_landed(cache: KVCache):
    cached(cache, 1, PROMPT)
    lease, _ = cache.prep_recv("r", PROMPT, 20, 0, 10.0)
    assert lease.begin == 20
    assert lease.state == "landed"
    assert cache.commit(lease.lease_id) == 20


def test_begin_below_the_watermark_uses_less(pair: tuple[KVCache, KVCache]):
    sender, receiver = pair
    lease, address = receiver.prep_recv("r", PROMPT, 21, 0, 10.0)
    send(sender, address, PROMPT, 0, 21)
    assert receiver.start_lease(lease.lease_id, ONE, PROMPT, 6) == 6
    compute(receiver, ONE, PROMPT[6:])
    assert_content(receiver, ONE, PROMPT)


def test_begin_below_what_matched_uses_the_match(cache: KVCache):
    cached(cache, 1, PROMPT)
    lease, _ = cache.prep_recv("r", PROMPT, 21, 0, 10.0)
    assert cache.start_lease(lease.lease_id, ONE, PROMPT, 0) == 20


def test_begin_above_the_watermark_waits(cache: KVCache):
    lease, _ = cache.prep_recv("r", PROMPT, 21, 0, 10.0)
    with pytest.raises(KVIncomplete):
        cache.start_lease(lease.lease_id, ONE, PROMPT, 1)
    assert cache.lease(lease.lease_id) is lease
    assert cache.start_lease(lease.lease_id, ONE, PROMPT, None) == 0


@pytest.mark.parametrize("begin", [-1, 22])
def test_begin_outside_the_lease_is_refused(cache: KVCache, begin: int):
    lease, _ = cache.prep_recv("r", PROMPT, 21, 0, 10.0)
    with pytest.raises(BadRange):
        cache.start_lease(lease.lease_id, ONE, PROMPT, begin)


def test_a_lease_of_the_whole_prompt_leaves_the_last_token(pair: tuple[KVCache, KVCache]):
    sender, receiver = pair
    lease, address = receiver.prep_recv("r", PROMPT, 22, 0, 10.0)
    send(sender, address, PROMPT, 0, 22)
    assert receiver.start_lease(lease.lease_id, ONE, PROMPT, None) == 21


def test_a_match_of_the_whole_prompt_leaves_the_last_page(cache: KVCache):
    cached(cache, 1, PROMPT)
    lease, _ = cache.prep_recv("r", PROMPT[:20], 20, 5, 10.0)
    assert cache.start_lease(lease.lease_id, ONE, PROMPT[:20], 19) == 16
    compute(cache, ONE, PROMPT[16:20])
    assert_content(cache, ONE, PROMPT[:20])
    assert cache.add_sequence(TWO, PROMPT) == 20  # the cached page was not written
    assert_content(cache, TWO, PROMPT[:20])


def test_commit_waits_for_all(pair: tuple[KVCache, KVCache]):
    sender, receiver = pair
    lease, address = receiver.prep_recv("r", PROMPT, 21, 0, 10.0)
    send(sender, address, PROMPT, 0, 20)
    with pytest.raises(KVIncomplete):
        receiver.commit(lease.lease_id)
    assert receiver.prefix_tokens == 0
    send(sender, address, PROMPT, 20, 21)
    receiver.commit(lease.lease_id)


def test_a_released_lease_is_gone(cache: KVCache):
    lease, _ = cache.prep_recv("r", PROMPT, 21, 0, 10.0)
    cache.release(lease.lease_id)
    assert cache.page_use().free == 32
    for call in (cache.release, cache.commit, cache.lease):
        with pytest.raises(LeaseExpired):
            call(lease.lease_id)
        with pytest.raises(UnknownLease):
            call(LeaseId("never"))


# Sending


def test_a_cancelled_put_lands_nothing_further(pair: tuple[KVCache, KVCache]):
    sender, receiver = pair
    lease, address = receiver.prep_recv("r", PROMPT, 21, 0, 10.0)
    put = sender.open_put(address, PROMPT, 0, 21)
    put.cancel()
    seq = sequence(sender, 1, PROMPT[:21])
    sender.mark_send(seq, put, 0, 21)
    put.close().result(10)
    assert receiver.lease(lease.lease_id).landed == 0
    assert not receiver.store.pool.count_nonzero()


# Stores


def test_a_removed_sequence_takes_its_put_out_of_the_store(pair: tuple[KVCache, KVCache]):
    sender, receiver = pair
    _, address = receiver.prep_recv("r", PROMPT, 21, 0, 30.0)
    seq_id = sequence(sender, 1, PROMPT)
    put = sender.open_put(address, PROMPT, 0, 21)
    sender.mark_send(seq_id, put, 0, 21)
    put.close().result(5)
    sender.remove_sequence(seq_id)
    assert not sender.store._puts  # type: ignore[attr-defined]


def test_a_fork_whose_copy_fails_leaves_nothing(cache: KVCache, monkeypatch: pytest.MonkeyPatch):
    seq_id = sequence(cache, 1, PROMPT)

    def fail(copies: object) -> None:
        raise RuntimeError("the device is gone")

    before = cache.page_use()
    with monkeypatch.context() as broken:
        broken.setattr(cache.store, "copy", fail)
        with pytest.raises(RuntimeError):
            cache.fork_sequence(seq_id, TWO, 10)
    cache.check_integrity()
    assert cache.page_use() == before
    cache.fork_sequence(seq_id, TWO, 10)
    assert_content(cache, TWO, PROMPT[:10])


def test_a_failing_transport_does_not_keep_the_store_open(
    cache: KVCache, monkeypatch: pytest.MonkeyPatch
):
    closed = []
    monkeypatch.setattr(cache.store, "close", lambda: closed.append("store"))

    def fail() -> None:
        raise OSError(107, "not connected")

    with monkeypatch.context() as broken:
        broken.setattr(cache.transport, "close", fail)
        with pytest.raises(OSError, match="not connected"):
            cache.close()
    assert closed == ["store"]
