"""The rules of the receive lease, each tested against the race that it prevents.

`tests/engine/service/test_engine_rules.py` tests `Draining` and the rules that need an engine;
`tests/kvcache/transport/test_transport.py` tests those that need stopped and killed processes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

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
    pages_of,
    send,
    sequence,
    small_layout,
)
from shm_peer import PAGES, Peer

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
)
from kvcache.lease.address import KVAddress
from kvcache.lease.control_slots import CLAIM, LANDED, RENEWALS
from kvcache.lease.put import Put
from kvcache.lease.receiver import STALL_S
from kvcache.lease.sender import Mirror
from kvcache.transport import ShmTransport
from kvcache.transport.mapped import MappedTarget
from kvcache.types import SeqId

NewCache = Callable[..., KVCache]
Pair = tuple[KVCache, KVCache]
ONE, TWO = SeqId(1), SeqId(2)
PROMPT = list(range(100, 122))  # five full pages and a half


class Gate:
    """Holds up senders within a copy, while they have the write right, like SIGSTOP."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def __enter__(self) -> None:
        assert self.reached.wait(10)

    def __exit__(self, *error: object) -> None:
        self.opened.set()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Within `with gate:`, a sender stops in its next copy before it writes a byte."""
    gate, copy = Gate(), MappedTarget.copy

    def held_up(self: MappedTarget, runs: object) -> None:
        gate.reached.set()
        assert gate.opened.wait(10)
        copy(self, runs)  # type: ignore[arg-type]

    monkeypatch.setattr(MappedTarget, "copy", held_up)
    yield gate
    gate.opened.set()


def wait_for_puts(mirror: Mirror) -> None:
    """Wait for the mirror's puts under way."""
    assert mirror.put is not None
    mirror.put.close().result(10)


@pytest.fixture
def shared_cache() -> Iterator[KVCache]:
    """A cache that other processes can put into, and a clock that runs."""
    layout = small_layout(PAGES)
    cache = make_cache(ShmTransport(1), layout, name="here", clock=time.monotonic)
    yield cache
    cache.check_integrity()
    cache.close()


# Claim


def test_claim_is_made_before_the_first_byte(pair: Pair):
    sender, receiver = pair
    lease, address = receiver.prep_recv("r", PROMPT, 21, 0, 10.0)
    words = receiver.transport.region.slots[lease.slot]
    assert int(words[CLAIM]) == 0
    sender.open_put(address, PROMPT, 0, 21)
    assert int(words[CLAIM]) != 0
    assert not receiver.store.pool.count_nonzero()


def test_claim_a_sender_stopped_between_check_and_write_does_not_write_to_new_owners(
    pair: Pair, gate: Gate
):
    """The receiver closes the lease and then only tries to take the right, without waiting.

    The sender has checked the lease, and writes after it has ended.
    """
    sender, receiver = pair
    lease, address = receiver.prep_recv("r", PROMPT, 21, 0, 10.0)
    put = sender.open_put(address, PROMPT, 0, 21)
    sender.mark_send(sequence(sender, 1, PROMPT[:21]), put, 0, 21)
    with gate:
        receiver.release(lease.lease_id)
        other = sequence(receiver, 2, range(500, 500 + 26 * SIZE))  # takes all remaining pages
        assert receiver.page_use().free == 0
        assert not set(pages_of(receiver, other)) & set(lease.own)
    with pytest.raises(LeaseExpired):
        put.close().result(10)
    assert_content(receiver, other, list(range(500, 500 + 26 * SIZE)))
    sender.clear_mark(ONE)


def test_claim_of_an_ended_lease_is_refused_before_a_byte_is_written(pair: tuple[KVCache, KVCache]):
    sender, receiver = pair
    lease, address = receiver.prep_recv("r", PROMPT, 21, 0, 10.0)
    receiver.release(lease.lease_id)
    with pytest.raises(LeaseExpired):
        sender.open_put(address, PROMPT, 0, 21)
    assert not receiver.store.pool.count_nonzero()


def test_claim_is_reread_so_that_an_ended_lease_is_not_written(
    pair: tuple[KVCache, KVCache],
):
    sender, receiver = pair
    lease, address = receiver.prep_recv("r", PROMPT, 21, 0, 10.0)
    put = sender.open_put(address, PROMPT, 0, 21)
    seq = sequence(sender, 1, PROMPT[:21])
    receiver.release(lease.lease_id)
    sender.mark_send(seq, put, 0, 21)
    with pytest.raises(LeaseExpired):
        put.close().result(10)
    assert not receiver.store.pool.count_nonzero()
    assert put.bytes_sent == 0
    sender.clear_mark(seq)


def test_claim_of_the_latest_sender_fences_the_earlier_one(pair: tuple[KVCache, KVCache]):
    sender, receiver = pair
    lease, address = receiver.prep_recv("r", PROMPT, 21, 0, 10.0)
    seq = sequence(sender, 1, PROMPT[:21])
    first = sender.open_put(address, PROMPT, 0, 21)
    second = sender.open_put(address, PROMPT, 0, 21)
    sender.mark_send(seq, first, 0, 21)
    with pytest.raises(LeaseExpired, match="taken over"):
        first.close().result(10)
    assert not receiver.store.pool.count_nonzero()
    sender.mark_send(seq, second, 0, 21)
    second.close().result(10)
    assert receiver.lease(lease.lease_id).landed == 21


# Quarantine


def test_quarantine_ends_by_proof_never_by_time(new_cache: NewCache, clock: Clock, gate: Gate):
    sender, receiver = new_cache(name="sender"), new_cache(name="receiver")
    lease, address = receiver.prep_recv("r", PROMPT, 21, 0, 10.0)
    put = sender.open_put(address, PROMPT, 0, 21)
    sender.mark_send(sequence(sender, 1, PROMPT[:21]), put, 0, 21)
    with gate:
        receiver.release(lease.lease_id)
        for _ in range(100):
            clock.now += 3600.0
            receiver.sweep()
        assert receiver.page_use().quarantined == 6  # which the engine's metrics show
        receiver.check_integrity()
    put.close().exception(10)
    receiver.sweep()
    assert receiver.page_use().free == 32
    sender.clear_mark(ONE)


def test_quarantine_is_skipped_for_unclaimed_leases(cache: KVCache):
    lease, _ = cache.prep_recv("r", PROMPT, 21, 0, 10.0)
    cache.release(lease.lease_id)
    assert cache.page_use().free == 32  # at once


def test_quarantine_counts_as_leased_pages(pair: Pair, gate: Gate):
    sender, receiver = pair
    lease, address = receiver.prep_recv("r", PROMPT, 20, 12 * SIZE - 20, 10.0)  # 12 pages of 16
    put = sender.open_put(address, PROMPT, 0, 20)
    sender.mark_send(sequence(sender, 1, PROMPT[:20]), put, 0, 20)
    with gate:
        receiver.release(lease.lease_id)
        assert receiver.page_use().quarantined == 12
        with pytest.raises(NoCapacity):
            receiver.prep_recv("s", PROMPT, 20, 0, 10.0)
        receiver.prep_recv("t", PROMPT, 16, 0, 10.0)
    put.close().exception(10)
    sender.clear_mark(ONE)


# Death


@pytest.mark.processes
def test_death_fences_and_keeps_the_lease(shared_cache: KVCache):
    """The tokens landed before the sender was killed stay until the lease ends, as in a replica."""
    lease, address = shared_cache.prep_recv("r", PROMPT, 21, 0, 60.0)
    peer = Peer("s")
    peer.call("send", address, PROMPT, 0, 10)
    peer.kill()
    for _ in range(3):
        shared_cache.sweep()
        assert shared_cache.lease(lease.lease_id).landed == 10
    assert shared_cache.page_use().leased == 6
    assert shared_cache.start_lease(lease.lease_id, ONE, PROMPT, None) == 10
    assert_content(shared_cache, ONE, PROMPT[:10])


# A watermark, not a bit


def test_a_watermark_is_the_contiguous_length_and_landed_iff_it_is_the_end(pair: Pair):
    sender, receiver = pair
    lease, address = receiver.prep_recv("r", PROMPT, 21, 0, 10.0)
    put = sender.open_put(address, PROMPT, 0, 21)
    sender.add_sequence(ONE)
    sender.mark_send(ONE, put, 0, 21)
    for at in range(0, 21, 3):
        assert (receiver.lease(lease.lease_id).landed, lease.state) == (at, "reserved")
        compute(sender, ONE, PROMPT[at : at + 3])
        put.close().result(10)
    assert (receiver.lease(lease.lease_id).landed, lease.state) == (21, "landed")
    sender.clear_mark(ONE)


def test_a_watermark_waits_for_issued_writes(pair: Pair, gate: Gate):
    sender, receiver = pair
    lease, address = receiver.prep_recv("r", PROMPT, 21, 0, 10.0)
    put = sender.open_put(address, PROMPT, 0, 21)
    sender.mark_send(sequence(sender, 1, PROMPT[:21]), put, 0, 21)
    with gate:
        assert receiver.lease(lease.lease_id).landed == 0
    put.close().result(10)
    assert receiver.lease(lease.lease_id).landed == 21
    sender.clear_mark(ONE)


def test_a_watermark_is_where_another_sender_continues_a_failed_send(new_cache: NewCache):
    first, second, receiver = (new_cache(name=name) for name in ("s", "t", "r"))
    lease, address = receiver.prep_recv("r", PROMPT, 21, 0, 10.0)
    put = first.open_put(address, PROMPT, 0, 21)
    first.add_sequence(ONE)
    first.mark_send(ONE, put, 0, 21)
    compute(first, ONE, PROMPT[:7])
    put.close().result(10)
    put.cancel()  # the sender gives no further sign of life
    send(second, address, PROMPT, receiver.lease(lease.lease_id).landed, 21)
    compute(first, ONE, PROMPT[7:21])
    put.close().result(10)
    assert receiver.start_lease(lease.lease_id, TWO, PROMPT, None) == 21
    assert_content(receiver, TWO, PROMPT[:21])
    first.clear_mark(ONE)


def test_a_watermark_cannot_rise_nor_a_byte_be_written_beyond_the_room(pair: Pair):
    sender, receiver = pair
    lease, address = receiver.prep_recv("r", PROMPT, 9, 2, 10.0)
    seq = sequence(sender, 1, PROMPT)
    layers = range(LAYERS)
    for misuse in (
        lambda put: put.write(layers, pages_of(sender, seq), 0, 12),
        lambda put: put.write(layers, pages_of(sender, seq), 12, 16),
        lambda put: put.signal(12),
        lambda put: put.signal(2**62),
    ):
        put = sender.open_put(address, PROMPT, 0, 9)
        misuse(put)
        with pytest.raises(BadRange, match="room"):
            put.close().result(10)
    assert not receiver.store.pool.count_nonzero()
    assert receiver.lease(lease.lease_id).landed == 0
    receiver.transport.region.slots[lease.slot, LANDED] = 2**62  # a faulty sender writes the word
    assert receiver.lease(lease.lease_id).landed == 11


def attend(sender: KVCache, layer: int) -> None:
    kv = torch.ones(21, KV_HEADS, DIM)
    sender.attention(layer, torch.zeros(21, HEADS, DIM), kv, kv)


def first_layer_put(sender: KVCache, address: str) -> Put:
    """Return a put of `PROMPT[:21]` whose step has computed its first layer."""
    put = sender.open_put(address, PROMPT, 0, 21)
    sender.add_sequence(ONE)
    sender.mark_send(ONE, put, 0, 21)
    sender.grow(ONE, 21)
    sender.begin_forward([ONE], [21])
    attend(sender, 0)
    return put


def test_a_watermark_rises_after_all_layers_not_after_some(pair: tuple[KVCache, KVCache]):
    sender, receiver = pair
    _, address = receiver.prep_recv("r", PROMPT, 21, 0, 10.0)
    put = first_layer_put(sender, address)
    put.close().result(10)  # all requested writes are done
    assert put.bytes_sent == 21 * sender.layout.token_bytes
    assert receiver.store.pool[0].count_nonzero() and not receiver.store.pool[1:].count_nonzero()
    for layer in range(1, LAYERS):
        attend(sender, layer)
    sender.end_forward()
    put.close().result(10)


def test_a_watermark_does_not_rise_over_a_step_that_failed(pair: tuple[KVCache, KVCache]):
    sender, receiver = pair
    lease, address = receiver.prep_recv("r", PROMPT, 21, 0, 10.0)
    put = first_layer_put(sender, address)
    sender.abort_forward()
    put.close().result(10)
    assert receiver.lease(lease.lease_id).landed == 0


def test_a_watermark_is_where_each_send_begins(pair: tuple[KVCache, KVCache]):
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


def test_a_watermark_does_not_rise_over_a_write_that_failed(pair: tuple[KVCache, KVCache]):
    sender, receiver = pair
    lease, address = receiver.prep_recv("r", PROMPT, 21, 0, 10.0)
    put = sender.open_put(address, PROMPT, 0, 21)
    put.write(range(1), [], 0, 21)  # has no pages
    put.signal(21)
    with pytest.raises(Internal):
        put.close().result(10)
    assert receiver.lease(lease.lease_id).landed == 0


# Content


def test_content_is_compared_by_the_sender(new_cache: NewCache):
    receiver = new_cache(name="receiver")
    lease, address = receiver.prep_recv("r", PROMPT, 21, 0, 10.0)
    same = new_cache(name="sender")
    with pytest.raises(BadAddress, match="secret"):
        new_cache(secret=b"other").open_put(address, PROMPT, 0, 21)
    with pytest.raises(BadAddress, match="weights"):
        new_cache(fingerprint="other").open_put(address, PROMPT, 0, 21)
    others = [[*PROMPT[:20], token] for token in range(1000, 1008)]  # digests larger and smaller
    for prompt in (*others, PROMPT[:20], []):
        with pytest.raises(BadAddress, match="prompt"):
            same.open_put(address, prompt, 0, 21)
    for begin, end in ((0, 22), (5, 5), (6, 5), (-1, 5)):
        with pytest.raises(BadRange):
            same.open_put(address, PROMPT, begin, end)
    with pytest.raises(StaleEpoch):
        new_cache(name="receiver", epoch=2).open_put(address, PROMPT, 0, 21)
    assert receiver.lease(lease.lease_id).landed == 0
    assert not receiver.store.pool.count_nonzero()


def test_content_is_compared_by_the_start(cache: KVCache):
    lease, _ = cache.prep_recv("r", PROMPT, 8, 0, 10.0)
    for other in ([*PROMPT[:7], 1], PROMPT[:7], []):
        with pytest.raises(BadRequest, match="another prompt"):
            cache.start_lease(lease.lease_id, ONE, other, None)
    cache.start_lease(lease.lease_id, ONE, [*PROMPT[:8], 1], None)


# Time


def test_time_is_not_renewed_by_a_start_that_waits(new_cache: NewCache, clock: Clock):
    cache = new_cache()
    lease, _ = cache.prep_recv("r", PROMPT, 21, 0, 2.0)
    watch = cache.watch([lease])
    for _ in range(4):
        clock.now += 0.5
        watch.read()
        with pytest.raises(KVIncomplete):
            cache.start_lease(lease.lease_id, ONE, PROMPT, 21)
        assert cache.sweep() == []
    clock.now += 0.1
    assert cache.sweep() == [lease]
    assert not watch.read()[1].any()


def test_time_does_not_end_a_started_lease(new_cache: NewCache, clock: Clock):
    sender, receiver = new_cache(name="sender"), new_cache(name="receiver")
    lease, address = receiver.prep_recv("r", PROMPT, 21, 4, 0.5)
    send(sender, address, PROMPT, 0, 21)
    receiver.start_lease(lease.lease_id, ONE, PROMPT, None)
    for _ in range(100):
        clock.now += 0.9
        assert receiver.sweep() == []
    compute(receiver, ONE, PROMPT[21:])
    assert_content(receiver, ONE, PROMPT)


def test_time_is_the_receivers_and_no_wall_clock(
    shared_cache: KVCache, pair: Pair, monkeypatch: pytest.MonkeyPatch
):
    def wall(*_: object) -> float:
        raise AssertionError("the wall clock was read")

    for name in ("time", "time_ns", "gmtime", "localtime"):
        monkeypatch.setattr(time, name, wall)
    sender, receiver = pair
    lease, address = receiver.prep_recv("r", PROMPT, 21, 0, 0.5)
    assert "time" not in KVAddress.__slots__ and "expires" not in KVAddress.__slots__
    send(sender, address, PROMPT, 0, 21)
    receiver.sweep()
    receiver.commit(lease.lease_id)
    shared_cache.prep_recv("r", PROMPT, 21, 0, 0.0)
    time.sleep(0.002)
    assert len(shared_cache.sweep()) == 1


def test_time_without_a_claim_is_lease_ms(new_cache: NewCache, clock: Clock):
    cache = new_cache()
    lease, _ = cache.prep_recv("r", PROMPT, 21, 0, 2.0)
    for _ in range(4):
        clock.now += 0.5
        assert cache.sweep() == []
    clock.now += 0.1
    assert cache.sweep() == [lease]
    assert cache.page_use().free == 32


def test_time_while_the_receiver_is_stopped_does_not_count(new_cache: NewCache, clock: Clock):
    cache = new_cache()
    lease, _ = cache.prep_recv("r", PROMPT, 21, 0, 2.0)
    clock.now += 3600.0
    assert cache.sweep() == []
    clock.now += STALL_S
    assert cache.sweep() == []
    clock.now += STALL_S
    assert cache.sweep() == [lease]


@pytest.mark.parametrize("lease_s", [0.1, 0.5, 1.0])
def test_time_of_a_stop_is_forgiven_to_short_leases_too(
    new_cache: NewCache, clock: Clock, lease_s: float
):
    cache = new_cache()
    lease, _ = cache.prep_recv("r", PROMPT, 21, 0, lease_s)
    clock.now += 3600.0
    assert cache.sweep() == []
    assert clock.now < lease.deadline < clock.now + lease_s
    clock.now += lease_s
    assert cache.sweep() == [lease]


def test_a_lease_ends_although_every_gap_between_sweeps_is_long(new_cache: NewCache, clock: Clock):
    """On a starved host a step may take seconds, and a sweep follows each step."""
    cache = new_cache()
    lease, _ = cache.prep_recv("r", PROMPT, 21, 0, 30.0)
    sweeps = 0
    while not cache.sweep():
        clock.now += 2 * STALL_S
        sweeps += 1
        assert lease.deadline <= clock.now + 30.0
        assert sweeps < 40
    assert sweeps > 15


def test_time_is_renewed_by_a_live_sender_even_in_a_queue(new_cache: NewCache, clock: Clock):
    sender, receiver = new_cache(name="sender"), new_cache(name="receiver")
    lease, address = receiver.prep_recv("r", PROMPT, 21, 0, 0.5)
    put = sender.open_put(address, PROMPT, 0, 21)
    for _ in range(10):  # the sender has nothing to write yet: it is queued
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


def test_time_landing_is_checked_before_expiry_and_renews_the_lease(
    new_cache: NewCache, clock: Clock
):
    sender, receiver = new_cache(name="sender"), new_cache(name="receiver")
    lease, address = receiver.prep_recv("r", PROMPT, 21, 0, 0.5)
    send(sender, address, PROMPT, 0, 21)
    clock.now += 0.9  # late, but landing is checked before the deadline
    receiver.leases()
    assert receiver.sweep() == []
    clock.now += 0.6
    assert receiver.sweep() == [lease]


# Starting while a writer may live


def test_starting_while_a_writer_may_live_beyond_the_prompt(pair: Pair, gate: Gate):
    """A mirror is stopped in a write of its reserve; its late write changes no sequence."""
    sender, receiver = pair
    lease, address = receiver.prep_recv("r", PROMPT, 22, 10, 10.0)
    tokens = [*PROMPT, *range(10)]
    gate.opened.set()
    mirror = sender.open_mirror(address, PROMPT)
    seq = sequence(sender, 1, tokens[:27])
    sender.mirror(seq, mirror, 1)
    wait_for_puts(mirror)
    gate.reached.clear()
    gate.opened.clear()
    compute(sender, seq, tokens[27:])
    sender.mirror(seq, mirror, 1)
    with gate:
        with pytest.raises(KVIncomplete):
            receiver.start_lease(lease.lease_id, TWO, tokens, None)
        assert receiver.start_lease(lease.lease_id, TWO, tokens, None, fence=True) == 27
        compute(receiver, TWO, [7, 8, 9])  # an output that differs from the sender's
        assert receiver.page_use().quarantined == 2
    with pytest.raises(LeaseExpired):
        wait_for_puts(mirror)
    assert_content(receiver, TWO, [*tokens[:27], 7, 8, 9])
    receiver.sweep()
    assert receiver.page_use().quarantined == 0
    sender.close_mirror(mirror)


def test_starting_while_a_writer_may_live_copies_the_page_of_the_watermark(
    pair: tuple[KVCache, KVCache],
):
    """The page with the watermark is copied, fresh ones follow, the old ones are quarantined."""
    sender, receiver = pair
    lease, address = receiver.prep_recv("r", PROMPT, 21, 0, 10.0)
    send(sender, address, PROMPT, 0, 10)
    region = receiver.transport.region
    assert region.try_acquire_right(lease.slot)  # a writer stopped during a copy
    with pytest.raises(KVIncomplete):
        receiver.start_lease(lease.lease_id, ONE, PROMPT, None)
    old = list(lease.own)
    assert receiver.start_lease(lease.lease_id, ONE, PROMPT, None, fence=True) == 10
    assert receiver.page_use().quarantined == 4
    assert pages_of(receiver, ONE)[:2] == old[:2]
    assert not set(pages_of(receiver, ONE)[2:]) & set(old)
    compute(receiver, ONE, PROMPT[10:])
    receiver.store.pool[:, old[2:]] = 7.0  # a late write of the stopped writer
    assert_content(receiver, ONE, PROMPT)
    receiver.check_integrity()
    receiver.sweep()
    assert receiver.page_use().quarantined == 4  # ended by proof, never by time
    region.release_right(lease.slot)
    receiver.sweep()
    assert receiver.page_use().quarantined == 0


def test_starting_while_a_writer_may_live_without_room_changes_nothing(
    pair: tuple[KVCache, KVCache],
):
    _, receiver = pair
    lease, _ = receiver.prep_recv("r", PROMPT, 21, 0, 10.0)
    receiver.add_sequence(TWO)
    receiver.grow(TWO, receiver.available * SIZE)
    region = receiver.transport.region
    assert region.try_acquire_right(lease.slot)
    with pytest.raises(NoCapacity):
        receiver.start_lease(lease.lease_id, ONE, PROMPT, None, fence=True)
    region.release_right(lease.slot)
    receiver.remove_sequence(TWO)
    assert receiver.start_lease(lease.lease_id, ONE, PROMPT, None) == 0


# Mirror


def test_mirror_sends_new_tokens_from_match_len_on_with_the_prompt(pair: Pair):
    sender, receiver = pair
    cached(receiver, 1, PROMPT[:8])
    lease, address = receiver.prep_recv("r", PROMPT, 22, 10, 10.0)
    tokens = [*PROMPT, *range(10)]
    mirror = sender.open_mirror(address, PROMPT)
    sender.add_sequence(ONE)
    whole = LAYERS * sender.layout.token_bytes
    sent = []
    for at in range(0, 32, 2):
        compute(sender, ONE, tokens[at : at + 2])
        sender.mirror(ONE, mirror, 3)
        wait_for_puts(mirror)
        assert mirror.put is not None
        sent.append(mirror.put.bytes_sent // whole)
    # From token 8 on, in puts of three or more tokens; the last put fills the room.
    assert sent == [0, 0, 0, 0, 0, 4, 4, 8, 8, 12, 12, 16, 16, 20, 20, 24]
    assert mirror.landed == receiver.lease(lease.lease_id).landed == 32
    assert lease.state == "landed"
    sender.close_mirror(mirror)
    assert receiver.start_lease(lease.lease_id, TWO, [*tokens, 1], None) == 32
    assert_content(receiver, TWO, tokens)


@pytest.mark.parametrize("output", range(12))
def test_mirror_starts_from_all_landed_tokens_but_the_last(pair: Pair, output: int):
    """The output may be shorter than the mirrored tokens; unreported tokens are computed again."""
    sender, receiver = pair
    lease, address = receiver.prep_recv("r", PROMPT, 22, 9, 10.0)
    tokens = [*PROMPT, *range(12)]
    mirror = sender.open_mirror(address, PROMPT)
    sender.mirror(sequence(sender, 1, tokens), mirror, 1)
    wait_for_puts(mirror)
    assert mirror.landed == 31
    length = receiver.start_lease(lease.lease_id, TWO, tokens[: 22 + output], None)
    assert length == min(31, 22 + output - 1)
    assert_content(receiver, TWO, tokens[:length])
    compute(receiver, TWO, tokens[length:])
    assert_content(receiver, TWO, tokens)
    sender.close_mirror(mirror)


def test_mirror_publishes_the_prompt_only(pair: Pair):
    sender, receiver = pair
    lease, address = receiver.prep_recv("r", PROMPT, 22, 10, 10.0)
    mirror = sender.open_mirror(address, PROMPT)
    sender.mirror(sequence(sender, 1, [*PROMPT, *range(12)]), mirror, 1)
    wait_for_puts(mirror)
    sender.close_mirror(mirror)
    assert receiver.commit(lease.lease_id) == 20
    assert receiver.prefix_tokens == 20
    assert receiver.page_use().free == 32 - 5


def test_mirror_pages_are_held_until_the_put_has_drained(pair: Pair, gate: Gate):
    """However the sequence ends, its pages are not reused while a put reads them."""
    sender, receiver = pair
    lease, address = receiver.prep_recv("r", PROMPT, 22, 0, 10.0)
    mirror = sender.open_mirror(address, PROMPT)
    seq = sequence(sender, 1, PROMPT)
    sender.mirror(seq, mirror, 1)
    with gate:
        sender.remove_sequence(seq)
        sender.check_integrity()
        assert sender.page_use().active == 6
        with pytest.raises(NoCapacity):
            sequence(sender, 2, range(500, 500 + 27 * SIZE))
        compute(sender, TWO, range(500, 500 + 26 * SIZE))
        sender.mirror(TWO, mirror, 1)  # one write at a time
        assert len(mirror.held) == 6
    wait_for_puts(mirror)
    assert mirror.held == []
    assert sender.page_use().free == 6
    assert receiver.start_lease(lease.lease_id, ONE, [*PROMPT, 1], None) == 22
    assert_content(receiver, ONE, PROMPT)
    sender.close_mirror(mirror)


def test_mirror_closed_during_a_put_reports_only_landed_tokens(pair: Pair, gate: Gate):
    sender, receiver = pair
    _, address = receiver.prep_recv("r", PROMPT, 22, 0, 10.0)
    mirror = sender.open_mirror(address, PROMPT)
    seq = sequence(sender, 1, PROMPT)
    sender.mirror(seq, mirror, 1)
    with gate:
        sender.close_mirror(mirror)
        sender.close_mirror(mirror)
    wait_for_puts(mirror)
    assert (mirror.landed, mirror.held) == (0, [])
    sender.mirror(seq, mirror, 1)
    assert mirror.held == []


def test_mirror_of_an_ended_lease_fails_and_frees_its_pages(pair: Pair):
    sender, receiver = pair
    lease, address = receiver.prep_recv("r", PROMPT, 22, 0, 10.0)
    mirror = sender.open_mirror(address, PROMPT)
    receiver.release(lease.lease_id)
    sender.mirror(sequence(sender, 1, PROMPT), mirror, 1)
    with pytest.raises(LeaseExpired):
        wait_for_puts(mirror)
    assert isinstance(mirror.failure, LeaseExpired)
    assert (mirror.landed, mirror.held) == (0, [])
    with pytest.raises(LeaseExpired):
        sender.open_mirror(address, PROMPT)
    assert not receiver.store.pool.count_nonzero()


def test_a_mirror_whose_write_cannot_be_queued_writes_nothing(pair: Pair, monkeypatch):
    """It fails between the write and the signal: what is queued must not be written."""
    sender, receiver = pair
    lease, address = receiver.prep_recv("r", PROMPT, 22, 0, 10.0)
    mirror = sender.open_mirror(address, PROMPT)
    assert mirror.put is not None
    cancelled: list[bool] = []
    monkeypatch.setattr(mirror.put, "signal", lambda landed: 1 / 0)
    cancel = mirror.put.cancel
    monkeypatch.setattr(mirror.put, "cancel", lambda: (cancelled.append(True), cancel()))
    sender.mirror(sequence(sender, 1, PROMPT), mirror, 1)
    assert isinstance(mirror.failure, Internal) and cancelled == [True]
    mirror.put.close().result(10)
    assert (mirror.landed, receiver.lease(lease.lease_id).landed) == (0, 0)
    receiver.release(lease.lease_id)


def test_mirror_gets_more_room_in_the_same_lease(pair: Pair):
    sender, receiver = pair
    lease, address = receiver.prep_recv("r", PROMPT, 22, 1, 10.0)
    mirror = sender.open_mirror(address, PROMPT)
    tokens = [*PROMPT, *range(20)]
    seq = sequence(sender, 1, tokens)
    sender.mirror(seq, mirror, 1)
    wait_for_puts(mirror)
    assert mirror.landed == 23
    same, extended = receiver.extend(address, 17)
    assert same is lease and lease.room == 40
    sender.extend_mirror(mirror, extended)
    sender.mirror(seq, mirror, 1)
    wait_for_puts(mirror)
    assert mirror.landed == receiver.lease(lease.lease_id).landed == 40
    receiver.start_lease(lease.lease_id, TWO, tokens, None)
    assert_content(receiver, TWO, tokens[:40])
    sender.close_mirror(mirror)


def test_mirror_that_is_closed_while_it_gets_more_room_writes_nothing_further(pair: Pair):
    sender, receiver = pair
    lease, address = receiver.prep_recv("r", PROMPT, 22, 0, 10.0)
    mirror = sender.open_mirror(address, PROMPT)
    put = mirror.put
    assert put is not None
    _, extended = receiver.extend(address, 17)
    region = receiver.transport.region
    assert region.try_acquire_right(lease.slot)  # holds up the writes
    seq = sequence(sender, 1, PROMPT)
    sender.mirror(seq, mirror, 1)
    with ThreadPoolExecutor(1) as thread:
        extending = thread.submit(sender.extend_mirror, mirror, extended)
        while not mirror.extending and not extending.done():
            time.sleep(0.001)
        sender.close_mirror(mirror)
        extending.result(10)
    region.release_right(lease.slot)
    put.close().result(10)
    assert put.bytes_sent == 0
    assert receiver.lease(lease.lease_id).landed == 0
    sender.remove_sequence(seq)
    assert sender.page_use().active == 0


def test_mirror_whose_claim_for_more_room_failed_sends_nothing_further(pair: Pair):
    """Its old claim may be lost."""
    sender, receiver = pair
    lease, address = receiver.prep_recv("r", PROMPT, 22, 1, 10.0)
    mirror = sender.open_mirror(address, PROMPT)
    put = mirror.put
    assert put is not None
    _, extended = receiver.extend(address, 17)
    receiver.release(lease.lease_id)
    with pytest.raises(LeaseExpired):
        sender.extend_mirror(mirror, extended)
    with pytest.raises(Internal, match="extended already"):
        sender.extend_mirror(mirror, extended)
    sender.mirror(sequence(sender, 1, PROMPT), mirror, 1)
    assert mirror.held == [] and put.bytes_sent == 0
    sender.close_mirror(mirror)


@pytest.mark.parametrize("state", ["closed", "extending"])
def test_mirror_gives_signs_of_life_only_with_a_claim(pair: Pair, state: str):
    sender, receiver = pair
    lease, address = receiver.prep_recv("r", PROMPT, 22, 1, 10.0)
    mirror = sender.open_mirror(address, PROMPT)
    words = receiver.transport.region.slots[lease.slot]
    mirror.renew()
    wait_for_puts(mirror)
    assert int(words[RENEWALS]) == 1
    setattr(mirror, state, True)
    mirror.renew()
    wait_for_puts(mirror)
    assert int(words[RENEWALS]) == 1
    Mirror(mirror.address).renew()  # has no put yet
    setattr(mirror, state, False)
    sender.close_mirror(mirror)


def test_mirror_whose_transport_is_closed_holds_no_pages_and_harms_no_step(pair: Pair):
    sender, receiver = pair
    _, address = receiver.prep_recv("r", PROMPT, 22, 0, 10.0)
    mirror = sender.open_mirror(address, PROMPT)
    seq = sequence(sender, 1, PROMPT)
    sender.transport.close()
    sender.mirror(seq, mirror, 1)
    assert isinstance(mirror.failure, Internal)
    sender.check_integrity()
    sender.remove_sequence(seq)
    assert sender.page_use().active == 0
    sender.close_mirror(mirror)


def test_mirror_whose_put_fails_to_queue_holds_no_pages(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
):
    sender, receiver = pair
    _, address = receiver.prep_recv("r", PROMPT, 22, 0, 10.0)
    mirror = sender.open_mirror(address, PROMPT)
    seq = sequence(sender, 1, PROMPT)

    def fail(self: MappedTarget) -> None:
        raise RuntimeError("the device has failed")

    monkeypatch.setattr(MappedTarget, "record_event", fail)
    sender.mirror(seq, mirror, 1)
    assert isinstance(mirror.failure, Internal)
    wait_for_puts(mirror)
    sender.remove_sequence(seq)
    assert sender.page_use().active == 0


def test_mirror_whose_watermark_fails_to_queue_writes_nothing_more(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
):
    sender, receiver = pair
    lease, address = receiver.prep_recv("r", PROMPT, 22, 0, 10.0)
    mirror = sender.open_mirror(address, PROMPT)
    put, region = mirror.put, receiver.transport.region
    assert put is not None and region.try_acquire_right(lease.slot)  # holds up the write

    def fail(landed: int) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(put, "signal", fail)
    sender.mirror(sequence(sender, 1, PROMPT), mirror, 1)
    region.release_right(lease.slot)
    wait_for_puts(mirror)
    assert isinstance(mirror.failure, Internal)
    assert (put.bytes_sent, mirror.landed, mirror.held) == (0, 0, [])


def test_mirror_holds_the_pages_that_it_sends_and_no_others(pair: Pair, gate: Gate):
    sender, receiver = pair
    cached(receiver, 1, PROMPT[:8])
    _, address = receiver.prep_recv("r", PROMPT, 21, 0, 10.0)
    mirror = sender.open_mirror(address, PROMPT)
    seq = sequence(sender, 1, [*PROMPT, *range(20)])
    sender.mirror(seq, mirror, 1)
    with gate:
        assert mirror.held == pages_of(sender, seq)[2:6]
    wait_for_puts(mirror)
    sender.close_mirror(mirror)


def test_mirror_extension_is_refused_for_any_bad_address(new_cache: NewCache):
    receiver = new_cache(name="receiver")
    lease, address = receiver.prep_recv("r", PROMPT, 21, 0, 10.0)
    other = new_cache(name="other")
    again = new_cache(name="receiver", epoch=2)
    for cache, error in ((other, BadAddress), (again, StaleEpoch)):
        with pytest.raises(error):
            cache.extend(address, 4)
    with pytest.raises(BadAddress):
        receiver.extend(address[:-4], 4)
    forged = replace(KVAddress.verify(address, b"secret"), room=1000).sign(b"theirs")
    with pytest.raises(BadAddress):
        receiver.extend(forged, 4)
    mirror = other.open_mirror(address, PROMPT)
    _, foreign = receiver.prep_recv("s", PROMPT[::-1], 4, 0, 10.0)
    with pytest.raises(BadAddress):
        other.extend_mirror(mirror, foreign)
    receiver.release(lease.lease_id)
    with pytest.raises(LeaseExpired):
        receiver.extend(address, 4)
    other.close_mirror(mirror)


# Pages


def test_pages_under_way_are_held_by_the_sender(pair: Pair):
    """The send also holds the matched pages, so they are not evicted."""
    sender, receiver = pair
    cached(sender, 1, PROMPT)
    _, address = receiver.prep_recv("r", PROMPT, 20, 0, 10.0)
    put = sender.open_put(address, PROMPT, 0, 20)
    sender.add_sequence(ONE, PROMPT[:20])
    with pytest.raises(NoCapacity):
        sequence(sender, 2, range(500, 500 + 28 * SIZE))
    sender.mark_send(ONE, put, 0, 20)
    put.close().result(10)
    sender.remove_sequence(ONE)
    compute(sender, TWO, range(500, 500 + 28 * SIZE))  # after the send the pages can be evicted


def test_pages_of_a_failed_send_are_not_published(pair: Pair):
    sender, receiver = pair
    lease, address = receiver.prep_recv("r", PROMPT, 20, 0, 10.0)
    put = sender.open_put(address, PROMPT, 0, 20)
    seq = sequence(sender, 1, PROMPT[:8])
    sender.mark_send(seq, put, 0, 20)
    receiver.release(lease.lease_id)
    compute(sender, seq, PROMPT[8:16])
    with pytest.raises(LeaseExpired):
        put.close().result(10)
    sender.clear_mark(seq)
    sent = put.bytes_sent
    compute(sender, seq, PROMPT[16:])  # nothing of it is sent
    put.close().exception(10)
    assert put.bytes_sent == sent
    assert sender.prefix_tokens == receiver.prefix_tokens == 0


def test_pages_that_are_full_are_published_and_the_tail_dropped(pair: tuple[KVCache, KVCache]):
    sender, receiver = pair
    lease, address = receiver.prep_recv("r", PROMPT, 22, 4, 10.0)
    send(sender, address, PROMPT, 0, 22)
    assert receiver.commit(lease.lease_id) == 20
    use = receiver.page_use()
    assert (use.cached, use.free + use.cached) == (5, use.total)
    with pytest.raises(LeaseExpired):
        receiver.lease(lease.lease_id)
    assert receiver.add_sequence(ONE, PROMPT) == 20
    assert_content(receiver, ONE, PROMPT[:20])


def test_pages_matched_by_a_lease_are_held(cache: KVCache):
    cached(cache, 1, PROMPT)
    cache.prep_recv("r", PROMPT, 20, 0, 10.0)
    with pytest.raises(NoCapacity):
        sequence(cache, 2, range(28 * SIZE))
    assert cache.prefix_tokens == 20
    cache.remove_sequence(TWO)


def test_pages_are_committed_once_by_repeated_calls(pair: Pair):
    sender, receiver = pair
    lease, address = receiver.prep_recv("r", PROMPT, 17, 0, 10.0)
    send(sender, address, PROMPT, 0, 17)
    assert [receiver.commit(lease.lease_id) for _ in range(2)] == [16, 16]
    with pytest.raises(LeaseExpired):
        receiver.release(lease.lease_id)
    assert receiver.commit(lease.lease_id) == 16
    assert receiver.prefix_tokens == 16


def test_pages_of_a_commit_that_are_already_cached_are_freed(pair: tuple[KVCache, KVCache]):
    sender, receiver = pair
    lease, address = receiver.prep_recv("r", PROMPT, 20, 0, 10.0)
    cached(receiver, 1, PROMPT)
    send(sender, address, PROMPT, 0, 20)
    receiver.commit(lease.lease_id)
    assert receiver.page_use().cached == 5


def test_pages_are_not_matched_before_their_commit(pair: tuple[KVCache, KVCache]):
    sender, receiver = pair
    lease, address = receiver.prep_recv("r", PROMPT, 20, 0, 10.0)
    send(sender, address, PROMPT, 0, 20)
    assert receiver.add_sequence(ONE, PROMPT) == 0
    receiver.release(lease.lease_id)
    assert receiver.prefix_tokens == 0


# No hold-and-wait


def test_no_hold_and_wait_holds_for_extensions(cache: KVCache):
    lease, address = cache.prep_recv("a", PROMPT, 21, 0, 10.0)  # 6 pages of 16
    with pytest.raises(BadRequest):
        cache.extend(address, 11 * SIZE)  # 17 pages: never
    cache.prep_recv("b", range(200, 200 + 8 * SIZE), 8 * SIZE, 0, 10.0)
    before = cache.page_use()
    with pytest.raises(NoCapacity):
        cache.extend(address, 3 * SIZE)
    sequence(cache, 1, range(500, 500 + 17 * SIZE))
    with pytest.raises(NoCapacity):
        cache.extend(address, SIZE)  # the only free page is reserved for the sequence's growth
    assert (cache.page_use().leased, lease.room) == (before.leased, 21)
    cache.extend(address, 3)  # the lease's last page has room for these
    assert (cache.page_use().leased, lease.room) == (before.leased, 24)


def test_no_hold_and_wait_leases_and_reserves_get_half_of_the_pool(cache: KVCache):
    first, _ = cache.prep_recv("a", range(8 * SIZE), 8 * SIZE, 0, 10.0)
    cache.prep_recv("b", range(200, 200 + 4 * SIZE), 4 * SIZE, 4 * SIZE, 10.0)  # with its reserve
    with pytest.raises(NoCapacity):
        cache.prep_recv("c", [5], 1, 0, 10.0)
    assert cache.page_use().leased == 16
    cache.release(first.lease_id)
    cache.prep_recv("c", [5], 1, 0, 10.0)


def test_no_hold_and_wait_a_lease_that_never_fits_is_a_bad_request(cache: KVCache):
    prompt = list(range(16 * SIZE))
    with pytest.raises(BadRequest):
        cache.prep_recv("a", prompt, len(prompt), 1, 10.0)
    cache.prep_recv("a", prompt, len(prompt), 0, 10.0)


def test_no_hold_and_wait_running_sequences_keep_a_page_each(cache: KVCache):
    sequence(cache, 1, range(20 * SIZE))
    sequence(cache, 2, range(500, 500 + 4 * SIZE))  # 8 pages are free
    with pytest.raises(NoCapacity):
        cache.prep_recv("a", range(300, 300 + 7 * SIZE), 7 * SIZE, 0, 10.0)
    cache.check_integrity()
    cache.prep_recv("a", range(300, 300 + 6 * SIZE), 6 * SIZE, 0, 10.0)


def test_no_hold_and_wait_no_capacity_takes_nothing(cache: KVCache):
    cached(cache, 1, PROMPT)
    sequence(cache, 2, range(500, 500 + 25 * SIZE))
    before = cache.page_use()
    with pytest.raises(NoCapacity):
        cache.prep_recv("a", [*PROMPT[:20], *range(12)], 32, 0, 10.0)
    assert cache.page_use() == before
    assert cache.leases() == []


def test_no_hold_and_wait_without_a_slot_takes_nothing(cache: KVCache):
    cached(cache, 1, PROMPT)
    before, free = cache.page_use(), cache.bookkeeping.receiver.leases.slots._free
    slots, free[:] = list(free), []
    with pytest.raises(NoCapacity, match="leases are open"):
        cache.prep_recv("a", PROMPT, 21, 0, 10.0)
    assert cache.page_use() == before
    cache.check_integrity()
    free[:] = slots
    cache.prep_recv("a", PROMPT, 21, 0, 10.0)


def test_no_hold_and_wait_a_new_lease_leaves_what_a_waiting_sequence_needs(cache: KVCache):
    _, address = cache.prep_recv("a", PROMPT, 21, 0, 10.0)  # 6 of 32 pages
    sequence(cache, 1, range(500, 500 + 10 * SIZE))
    cache.reserve(14 * SIZE)
    with pytest.raises(NoCapacity):
        cache.prep_recv("b", range(200, 208), 8, 0, 10.0)
    cache.prep_recv("b", range(200, 204), 4, 0, 10.0)  # 15 pages are left: one to grow into
    cache.extend(address, SIZE)  # what runs already may grow
    with pytest.raises(NoCapacity):
        cache.grow(ONE, 11 * SIZE, newcomer=True)
    cache.grow(ONE, 11 * SIZE)
    cache.reserve(0)
    cache.prep_recv("c", range(200, 208), 8, 0, 10.0)
