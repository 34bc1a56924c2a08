"""The cache's sequences, leases and sends, over the memory transport."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from kv_helpers import (
    DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    SIZE,
    Clock,
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
    BadAddress,
    BadRange,
    BadRequest,
    Internal,
    KVIncomplete,
    LeaseExpired,
    NoCapacity,
    StaleEpoch,
    UnknownLease,
)
from kvcache.pool import SCRATCH_PAGE
from kvcache.receiving import STALL_S
from kvcache.transport import MemoryNetwork, MemoryTransport
from kvcache.types import LeaseId, SeqId

NewCache = Callable[..., KVCache]
ONE, TWO = SeqId(1), SeqId(2)
PROMPT = list(range(100, 122))  # five full pages and a half


def test_a_page_size_that_does_not_divide_the_block_is_refused():
    layout = small_layout(4, page_size=48)
    with pytest.raises(BadRequest):
        make_cache(MemoryTransport(MemoryNetwork(), layout, 1), layout)


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
    assert not cache.pool[:, SCRATCH_PAGE].count_nonzero()
    assert int(cache.pool[0].count_nonzero()) == 2 * KV_HEADS * DIM


def test_integrity_notices_a_written_scratch_page():
    cache = memory_cache(MemoryNetwork())
    cache.pool[0, SCRATCH_PAGE, 0, 0] = torch.nan
    with pytest.raises(Internal, match="scratch"):
        cache.check_integrity()
    cache.transport.close()


# Receiving


@pytest.fixture
def pair(new_cache: NewCache) -> tuple[KVCache, KVCache]:
    return new_cache(name="sender"), new_cache(name="receiver")


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


def test_a_second_send_goes_on_at_the_watermark(pair: tuple[KVCache, KVCache]):
    sender, receiver = pair
    lease, address = receiver.prep_recv("r", PROMPT, 21, 0, 10.0)
    send(sender, address, PROMPT, 0, 10)
    assert receiver.lease(lease.lease_id).landed == 10
    assert receiver.lease(lease.lease_id).state == "reserved"
    for begin in (0, 8, 12):
        with pytest.raises(BadRange, match="10 tokens have landed"):
            sender.open_put(address, PROMPT, begin, 21)
    send(sender, address, PROMPT, 10, 21)
    receiver.start_lease(lease.lease_id, ONE, PROMPT, None)
    assert_content(receiver, ONE, PROMPT[:21])


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


def test_another_prompt_cannot_start(cache: KVCache):
    lease, _ = cache.prep_recv("r", PROMPT, 8, 0, 10.0)
    for other in ([*PROMPT[:7], 1], PROMPT[:7], []):
        with pytest.raises(BadRequest, match="another prompt"):
            cache.start_lease(lease.lease_id, ONE, other, None)
    cache.start_lease(lease.lease_id, ONE, [*PROMPT[:8], 1], None)


def test_commit_publishes_full_pages_and_drops_the_tail(pair: tuple[KVCache, KVCache]):
    sender, receiver = pair
    lease, address = receiver.prep_recv("r", PROMPT, 22, 4, 10.0)
    send(sender, address, PROMPT, 0, 22)
    assert receiver.commit(lease.lease_id) == 20
    use = receiver.page_use()
    assert (use.cached, use.free + use.cached) == (5, use.total)
    with pytest.raises(LeaseExpired):
        receiver.commit(lease.lease_id)
    assert receiver.add_sequence(ONE, PROMPT) == 20
    assert_content(receiver, ONE, PROMPT[:20])


def test_commit_waits_for_all(pair: tuple[KVCache, KVCache]):
    sender, receiver = pair
    lease, address = receiver.prep_recv("r", PROMPT, 21, 0, 10.0)
    send(sender, address, PROMPT, 0, 20)
    with pytest.raises(KVIncomplete):
        receiver.commit(lease.lease_id)
    assert receiver.prefix_tokens == 0
    send(sender, address, PROMPT, 20, 21)
    receiver.commit(lease.lease_id)


def test_a_commit_that_meets_its_prefix_frees_the_duplicate(pair: tuple[KVCache, KVCache]):
    sender, receiver = pair
    lease, address = receiver.prep_recv("r", PROMPT, 20, 0, 10.0)
    cached(receiver, 1, PROMPT)
    send(sender, address, PROMPT, 0, 20)
    receiver.commit(lease.lease_id)
    assert receiver.page_use().cached == 5


def test_nothing_matches_before_it_is_committed(pair: tuple[KVCache, KVCache]):
    sender, receiver = pair
    lease, address = receiver.prep_recv("r", PROMPT, 20, 0, 10.0)
    send(sender, address, PROMPT, 0, 20)
    assert receiver.add_sequence(ONE, PROMPT) == 0
    receiver.release(lease.lease_id)
    assert receiver.prefix_tokens == 0


def test_a_released_lease_is_gone(cache: KVCache):
    lease, _ = cache.prep_recv("r", PROMPT, 21, 0, 10.0)
    cache.release(lease.lease_id)
    assert cache.page_use().free == 32
    for call in (cache.release, cache.commit, cache.lease):
        with pytest.raises(LeaseExpired):
            call(lease.lease_id)
        with pytest.raises(UnknownLease):
            call(LeaseId("never"))


def test_a_lease_holds_what_it_matched(cache: KVCache):
    cached(cache, 1, PROMPT)
    cache.prep_recv("r", PROMPT, 20, 0, 10.0)
    with pytest.raises(NoCapacity):
        sequence(cache, 2, range(28 * SIZE))
    assert cache.prefix_tokens == 20
    cache.remove_sequence(TWO)


def test_leases_get_half_of_the_pool(cache: KVCache):
    first, _ = cache.prep_recv("a", range(8 * SIZE), 8 * SIZE, 0, 10.0)
    cache.prep_recv("b", range(200, 200 + 4 * SIZE), 4 * SIZE, 4 * SIZE, 10.0)  # with its reserve
    with pytest.raises(NoCapacity):
        cache.prep_recv("c", [5], 1, 0, 10.0)
    assert cache.page_use().leased == 16
    cache.release(first.lease_id)
    cache.prep_recv("c", [5], 1, 0, 10.0)


def test_what_never_fits_is_a_bad_request(cache: KVCache):
    prompt = list(range(16 * SIZE))
    with pytest.raises(BadRequest):
        cache.prep_recv("a", prompt, len(prompt), 1, 10.0)
    cache.prep_recv("a", prompt, len(prompt), 0, 10.0)


def test_a_lease_leaves_running_sequences_a_page_each(cache: KVCache):
    sequence(cache, 1, range(20 * SIZE))
    sequence(cache, 2, range(500, 500 + 4 * SIZE))  # 8 pages are free
    with pytest.raises(NoCapacity):
        cache.prep_recv("a", range(300, 300 + 7 * SIZE), 7 * SIZE, 0, 10.0)
    cache.check_integrity()
    cache.prep_recv("a", range(300, 300 + 6 * SIZE), 6 * SIZE, 0, 10.0)


def test_no_capacity_takes_nothing(cache: KVCache):
    cached(cache, 1, PROMPT)
    sequence(cache, 2, range(500, 500 + 25 * SIZE))
    before = cache.page_use()
    with pytest.raises(NoCapacity):
        cache.prep_recv("a", [*PROMPT[:20], *range(12)], 32, 0, 10.0)
    assert cache.page_use() == before
    assert cache.leases() == []


# Time


def test_a_lease_that_nobody_writes_expires(new_cache: NewCache, clock: Clock):
    cache = new_cache()
    lease, _ = cache.prep_recv("r", PROMPT, 21, 0, 2.0)
    for _ in range(4):
        clock.now += 0.5
        assert cache.sweep() == []
    clock.now += 0.1
    assert cache.sweep() == [lease]
    assert cache.page_use().free == 32


def test_time_that_the_receiver_stood_still_does_not_count(new_cache: NewCache, clock: Clock):
    cache = new_cache()
    lease, _ = cache.prep_recv("r", PROMPT, 21, 0, 2.0)
    clock.now += 3600.0
    assert cache.sweep() == []
    clock.now += STALL_S
    assert cache.sweep() == []
    clock.now += STALL_S
    assert cache.sweep() == []
    clock.now += 0.1
    assert cache.sweep() == [lease]


def test_a_sender_at_work_keeps_its_lease(new_cache: NewCache, clock: Clock):
    sender, receiver = new_cache(name="sender"), new_cache(name="receiver")
    lease, address = receiver.prep_recv("r", PROMPT, 21, 0, 0.5)
    put = sender.open_put(address, PROMPT, 0, 21)
    for _ in range(10):  # it has nothing to write yet: it waits for its turn
        clock.now += 0.4
        put.renew()
        put.renew()
        put.close().result(10)
        assert receiver.sweep() == []
    clock.now += 0.6
    assert receiver.sweep() == [lease]
    put.renew()
    with pytest.raises(LeaseExpired):
        put.close().result(10)
    assert put.failed


def test_landing_renews_once(new_cache: NewCache, clock: Clock):
    sender, receiver = new_cache(name="sender"), new_cache(name="receiver")
    lease, address = receiver.prep_recv("r", PROMPT, 21, 0, 0.5)
    send(sender, address, PROMPT, 0, 21)
    clock.now += 0.9  # late, but landing is looked at first
    receiver.leases()
    assert receiver.sweep() == []
    clock.now += 0.6
    assert receiver.sweep() == [lease]


# Sending


def test_an_ended_lease_is_refused_before_a_byte_is_written(pair: tuple[KVCache, KVCache]):
    sender, receiver = pair
    lease, address = receiver.prep_recv("r", PROMPT, 21, 0, 10.0)
    receiver.release(lease.lease_id)
    with pytest.raises(LeaseExpired):
        sender.open_put(address, PROMPT, 0, 21)
    assert not receiver.pool.count_nonzero()


def test_a_lease_that_ends_during_the_put_is_written_no_more(pair: tuple[KVCache, KVCache]):
    sender, receiver = pair
    lease, address = receiver.prep_recv("r", PROMPT, 21, 0, 10.0)
    put = sender.open_put(address, PROMPT, 0, 21)
    seq = sequence(sender, 1, PROMPT[:21])
    receiver.release(lease.lease_id)
    sender.mark_send(seq, put, 0, 21)
    with pytest.raises(LeaseExpired):
        put.close().result(10)
    assert not receiver.pool.count_nonzero()
    assert put.bytes_sent == 0
    sender.clear_mark(seq)


def test_the_latest_sender_fences_the_earlier_one(pair: tuple[KVCache, KVCache]):
    sender, receiver = pair
    lease, address = receiver.prep_recv("r", PROMPT, 21, 0, 10.0)
    seq = sequence(sender, 1, PROMPT[:21])
    first = sender.open_put(address, PROMPT, 0, 21)
    second = sender.open_put(address, PROMPT, 0, 21)
    sender.mark_send(seq, first, 0, 21)
    with pytest.raises(LeaseExpired, match="taken over"):
        first.close().result(10)
    assert not receiver.pool.count_nonzero()
    sender.mark_send(seq, second, 0, 21)
    second.close().result(10)
    assert receiver.lease(lease.lease_id).landed == 21


def test_a_cancelled_put_lands_nothing_further(pair: tuple[KVCache, KVCache]):
    sender, receiver = pair
    lease, address = receiver.prep_recv("r", PROMPT, 21, 0, 10.0)
    put = sender.open_put(address, PROMPT, 0, 21)
    put.cancel()
    seq = sequence(sender, 1, PROMPT[:21])
    sender.mark_send(seq, put, 0, 21)
    put.close().result(10)
    assert receiver.lease(lease.lease_id).landed == 0
    assert not receiver.pool.count_nonzero()


def test_a_write_that_goes_wrong_fails_the_put(pair: tuple[KVCache, KVCache]):
    sender, receiver = pair
    lease, address = receiver.prep_recv("r", PROMPT, 21, 0, 10.0)
    put = sender.open_put(address, PROMPT, 0, 21)
    put.write(range(1), [], 0, 21)  # has no pages
    put.signal(21)
    with pytest.raises(Internal):
        put.close().result(10)
    assert receiver.lease(lease.lease_id).landed == 0


def test_a_failed_step_signals_nothing(pair: tuple[KVCache, KVCache]):
    sender, receiver = pair
    lease, address = receiver.prep_recv("r", PROMPT, 21, 0, 10.0)
    put = sender.open_put(address, PROMPT, 0, 21)
    sender.add_sequence(ONE)
    sender.mark_send(ONE, put, 0, 21)
    sender.grow(ONE, 21)
    sender.begin_forward([ONE], [21])
    kv = torch.ones(21, KV_HEADS, DIM)
    sender.attention(0, torch.zeros(21, HEADS, DIM), kv, kv)
    sender.abort_forward()
    put.close().result(10)
    assert receiver.lease(lease.lease_id).landed == 0


def test_layers_are_put_while_later_ones_are_computed(pair: tuple[KVCache, KVCache]):
    sender, receiver = pair
    _, address = receiver.prep_recv("r", PROMPT, 21, 0, 10.0)
    put = sender.open_put(address, PROMPT, 0, 21)
    sender.add_sequence(ONE)
    sender.mark_send(ONE, put, 0, 21)
    sender.grow(ONE, 21)
    sender.begin_forward([ONE], [21])
    kv = torch.ones(21, KV_HEADS, DIM)
    sender.attention(0, torch.zeros(21, HEADS, DIM), kv, kv)
    put.close().result(10)  # whatever has been asked for is done
    assert put.bytes_sent == 21 * sender.layout.token_bytes
    assert receiver.pool[0].count_nonzero() and not receiver.pool[1:].count_nonzero()
    for layer in range(1, LAYERS):
        sender.attention(layer, torch.zeros(21, HEADS, DIM), kv, kv)
    sender.end_forward()
    put.close().result(10)


def test_bad_addresses_are_refused(new_cache: NewCache):
    receiver = new_cache(name="receiver")
    lease, address = receiver.prep_recv("r", PROMPT, 21, 0, 10.0)
    same = new_cache(name="sender")
    with pytest.raises(BadAddress, match="secret"):
        new_cache(secret=b"other").open_put(address, PROMPT, 0, 21)
    with pytest.raises(BadAddress, match="weights"):
        new_cache(fingerprint="other").open_put(address, PROMPT, 0, 21)
    for prompt in ([*PROMPT[:20], 1], PROMPT[:20], []):
        with pytest.raises(BadAddress, match="prompt"):
            same.open_put(address, prompt, 0, 21)
    for begin, end in ((0, 22), (5, 5), (6, 5), (-1, 5)):
        with pytest.raises(BadRange):
            same.open_put(address, PROMPT, begin, end)
    with pytest.raises(StaleEpoch):
        new_cache(name="receiver", epoch=2).open_put(address, PROMPT, 0, 21)
    assert receiver.lease(lease.lease_id).landed == 0
    assert not receiver.pool.count_nonzero()


def test_a_start_leaves_a_stopped_writer_behind(pair: tuple[KVCache, KVCache]):
    """The page with the watermark is copied, fresh ones follow, the old ones are quarantined."""
    sender, receiver = pair
    lease, address = receiver.prep_recv("r", PROMPT, 21, 0, 10.0)
    send(sender, address, PROMPT, 0, 10)
    region = receiver.transport.region
    assert region.try_right(lease.slot)  # a writer that was stopped in the middle of a copy
    with pytest.raises(KVIncomplete):
        receiver.start_lease(lease.lease_id, ONE, PROMPT, None)
    old = list(lease.own)
    assert receiver.start_lease(lease.lease_id, ONE, PROMPT, None, fence=True) == 10
    assert receiver.page_use().quarantined == 4
    assert pages_of(receiver, ONE)[:2] == old[:2]
    assert not set(pages_of(receiver, ONE)[2:]) & set(old)
    compute(receiver, ONE, PROMPT[10:])
    receiver.pool[:, old[2:]] = 7.0  # what the writer may still do
    assert_content(receiver, ONE, PROMPT)
    receiver.check_integrity()
    receiver.sweep()
    assert receiver.page_use().quarantined == 4  # ended by proof, never by time
    region.drop_right(lease.slot)
    receiver.sweep()
    assert receiver.page_use().quarantined == 0


def test_leaving_a_writer_behind_needs_room_and_changes_nothing_without(
    pair: tuple[KVCache, KVCache],
):
    _, receiver = pair
    lease, _ = receiver.prep_recv("r", PROMPT, 21, 0, 10.0)
    receiver.add_sequence(TWO)
    receiver.grow(TWO, receiver.available * SIZE)
    region = receiver.transport.region
    assert region.try_right(lease.slot)
    with pytest.raises(NoCapacity):
        receiver.start_lease(lease.lease_id, ONE, PROMPT, None, fence=True)
    region.drop_right(lease.slot)
    receiver.remove_sequence(TWO)
    assert receiver.start_lease(lease.lease_id, ONE, PROMPT, None) == 0
