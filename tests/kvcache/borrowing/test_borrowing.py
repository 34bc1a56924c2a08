"""Blocks on their way to a creditor, away, and lost: what their sequences can do meanwhile."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kv_helpers import HEADS, LAYERS, SIZE, kv_of, memory_cache, sequence
from one_creditor import PAGES, PER_BLOCK, TOKENS, OneCreditor, Scene

from kvcache.attention import BLOCK
from kvcache.cache import KVCache
from kvcache.errors import (
    BadRange,
    BadRequest,
    Internal,
    NoCapacity,
    PeerUnreachable,
    StaleEpoch,
    Unsupported,
)
from kvcache.lease import KVAddress
from kvcache.lending import BorrowedBlock
from kvcache.page_store.sharded import ShardedPageStore
from kvcache.remote_attention import AttentionShape, CreditorFailed, RemoteAttention
from kvcache.transport import MemoryNetwork
from kvcache.types import EngineId, SeqId


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.close()


def test_a_block_moves_with_its_kv_and_its_pages_come_free(scene: Scene):
    seq_id = scene.long()
    before = scene.cache.available
    scene.move(seq_id, 2)
    assert scene.elsewhere.away(seq_id) == 2 == scene.elsewhere.moved
    assert scene.cache.available == before + 2 * PER_BLOCK
    assert scene.elsewhere.local_pages(seq_id) == PER_BLOCK + 3
    for number, block in enumerate(scene.source.out):
        for layer in range(LAYERS):
            begin = number * BLOCK
            expected = kv_of(TOKENS[begin : begin + BLOCK], layer, begin)
            assert torch.equal(scene.content(block, layer), expected)
    assert scene.cache.length(seq_id) == len(TOKENS)
    scene.cache.check_integrity()
    scene.cache.remove_sequence(seq_id)
    assert scene.source.out == []
    assert scene.creditor.bookkeeping.lender.lent == 0


def test_only_full_blocks_move(scene: Scene):
    seq_id = sequence(scene.cache, 1, TOKENS[: 2 * BLOCK - 1])
    assert scene.elsewhere.move_oldest(seq_id, TOKENS)
    assert not scene.elsewhere.move_oldest(seq_id, TOKENS)
    scene.arrive()
    assert not scene.elsewhere.move_oldest(seq_id, TOKENS)


def test_nothing_is_let_go_before_the_put_has_drained(scene: Scene):
    """The creditor's write right is held by another, so the put waits."""
    seq_id = scene.long()
    take = scene.source.take
    held = []

    def take_held() -> BorrowedBlock | None:
        block = take()
        assert block is not None
        slot = KVAddress.verify(block.address, b"secret").slot
        assert scene.creditor.store.slots.try_acquire_right(slot)
        held.append(slot)
        return block

    scene.source.take = take_held  # type: ignore[method-assign]
    available = scene.cache.available
    assert scene.elsewhere.move_oldest(seq_id, TOKENS)
    assert scene.elsewhere.moving(seq_id) == 1
    time.sleep(0.02)
    assert scene.elsewhere.settle() == 0
    assert scene.cache.available == available
    scene.cache.check_integrity()
    scene.cache.remove_sequence(seq_id)  # its pages wait for the put
    assert scene.cache.available == PAGES - PER_BLOCK
    scene.creditor.store.slots.release_right(held[0])
    assert scene.arrive() == 0
    assert scene.cache.available == PAGES
    assert scene.source.out == []


def test_a_failed_move_changes_nothing(scene: Scene):
    seq_id = scene.long()
    take = scene.source.take

    def take_ended() -> BorrowedBlock | None:
        block = take()
        assert block is not None
        scene.source.end(block)
        return block

    scene.source.take = take_ended  # type: ignore[method-assign]
    available = scene.cache.available
    assert scene.elsewhere.move_oldest(seq_id, TOKENS)
    assert scene.arrive() == 0
    assert scene.source.out == []
    assert scene.cache.available == available
    assert scene.elsewhere.away(seq_id) == 0
    scene.source.take = take  # type: ignore[method-assign]
    scene.move(seq_id)


def test_a_loan_that_ends_during_the_move(scene: Scene):
    seq_id = scene.long()
    assert scene.elsewhere.move_oldest(seq_id, TOKENS)
    scene.source.on_lost(EngineId("b"), [scene.source.out[0].loan])
    assert scene.elsewhere.take_losses() == (0, 0)
    assert scene.arrive() == 0
    assert scene.elsewhere.away(seq_id) == 0
    assert scene.source.out == []


def test_pages_of_a_cached_prefix_can_be_taken_once_it_is_away(scene: Scene):
    """In the prefix tree, what is still in use would keep them from being evicted."""
    seq_id = scene.long()
    scene.cache.publish(seq_id, TOKENS)
    scene.move(seq_id, 2)
    other = SeqId(2)
    assert scene.cache.add_sequence(other, TOKENS) == 0
    scene.cache.grow(other, scene.cache.available * SIZE)
    scene.cache.check_integrity()
    scene.cache.remove_sequence(other)


def test_shared_blocks_stay(scene: Scene):
    """Pages that another sequence uses would not come free; neither would pinned ones."""
    seq_id = scene.long()
    scene.cache.fork_sequence(seq_id, SeqId(2), BLOCK)
    scene.cache.publish(seq_id, TOKENS[: 2 * BLOCK])
    scene.cache.pin(TOKENS[: 2 * BLOCK])
    scene.move(seq_id)
    assert scene.cache._sequences[seq_id].away is not None
    assert 2 in scene.cache._sequences[seq_id].away
    assert not scene.elsewhere.move_oldest(seq_id, TOKENS)
    scene.cache.unpin(TOKENS[: 2 * BLOCK])
    scene.move(seq_id)
    assert 1 in scene.cache._sequences[seq_id].away


def test_what_a_sequence_with_blocks_elsewhere_refuses(scene: Scene):
    seq_id = scene.long()
    scene.move(seq_id)
    for length in (1, BLOCK, len(TOKENS)):
        with pytest.raises(Unsupported):
            scene.cache.fork_sequence(seq_id, SeqId(2), length)
    scene.cache.fork_sequence(seq_id, SeqId(2), 0)
    with pytest.raises(NoCapacity):
        scene.cache.swap_out(seq_id)
    with pytest.raises(Unsupported):
        scene.cache.pop(seq_id, len(TOKENS) - BLOCK + 1)
    with pytest.raises(BadRange):
        scene.cache.pop(seq_id, len(TOKENS) + 1)
    scene.cache.pop(seq_id, len(TOKENS) - BLOCK - 5)
    assert scene.cache.length(seq_id) == BLOCK + 5
    scene.cache.check_integrity()
    scene.cache.publish(seq_id, TOKENS)
    assert scene.cache.prefix_tokens == 0
    lease, address = scene.creditor.prep_recv("r", TOKENS[:BLOCK], BLOCK, 0, 5.0)
    put = scene.cache.open_put(address, TOKENS[:BLOCK], 0, BLOCK)
    with pytest.raises(Unsupported):
        scene.cache.mark_send(seq_id, put, 0, BLOCK)
    put.close().result(10)
    mirror = scene.cache.open_mirror(address, TOKENS[:BLOCK])
    scene.cache.mirror(seq_id, mirror, 1)
    assert isinstance(mirror.failure, Unsupported)
    scene.cache.close_mirror(mirror)
    scene.creditor.release(lease.lease_id)


def test_publishing_stops_at_the_first_hole(scene: Scene):
    seq_id = scene.long()
    scene.cache.fork_sequence(seq_id, SeqId(2), BLOCK)  # keeps the first block here
    scene.move(seq_id)
    scene.cache.publish(seq_id, TOKENS)
    assert scene.cache.prefix_tokens == BLOCK
    scene.cache.fork_sequence(seq_id, SeqId(3), BLOCK)
    assert scene.cache.length(SeqId(3)) == BLOCK


def test_a_lost_block_is_a_gap_that_is_computed_again(scene: Scene):
    seq_id = scene.long()
    scene.move(seq_id, 3)
    lost = scene.source.out[1]
    scene.source.on_lost(EngineId("b"), [lost.loan])
    assert scene.elsewhere.take_losses() == (1, BLOCK)
    assert lost not in scene.source.out
    cache = scene.cache
    assert cache.length(seq_id) == cache.planned_length(seq_id) == BLOCK
    cache.check_integrity()
    with pytest.raises(Internal, match="no pages"):
        cache.begin_forward([seq_id], [4])
    room = scene.elsewhere.grow_some(seq_id, len(TOKENS), 0)
    assert room == BLOCK
    with pytest.raises(Internal, match="present"):
        cache.begin_forward([seq_id], [BLOCK + 1])
    fill(cache, seq_id, 50)
    assert cache.length(seq_id) == BLOCK + 50
    cache.check_integrity()
    assert not scene.elsewhere.move_oldest(seq_id, TOKENS)
    fill(cache, seq_id, BLOCK - 50)
    assert cache.length(seq_id) == len(TOKENS)
    scene.move(seq_id)
    assert scene.elsewhere.away(seq_id) == 3


def test_the_last_block_is_lost(scene: Scene):
    seq_id = sequence(scene.cache, 1, TOKENS[: 2 * BLOCK])
    scene.move(seq_id, 2)
    scene.source.on_lost(EngineId("b"), [block.loan for block in scene.source.out])
    assert scene.elsewhere.take_losses() == (2, 2 * BLOCK)
    assert scene.cache.length(seq_id) == 0
    scene.cache.check_integrity()
    assert scene.elsewhere.grow_some(seq_id, 2 * BLOCK, 0) == 2 * BLOCK
    fill(scene.cache, seq_id, BLOCK)
    assert scene.cache.length(seq_id) == BLOCK


def fill(cache: KVCache, seq_id: SeqId, count: int) -> None:
    """Count the next tokens as computed, without asking the creditor."""
    cache.begin_forward([seq_id], [count])
    cache.end_forward()


def test_room_is_made_as_far_as_pages_go(scene: Scene):
    seq_id = sequence(scene.cache, 1, TOKENS[: BLOCK + 2])
    available = scene.cache.available
    assert scene.elsewhere.grow_some(seq_id, 100_000, 10) == 2 + (available - 10) * SIZE
    assert scene.cache.available == 10
    assert scene.elsewhere.grow_some(seq_id, 100_000, 10) == 2 + (available - 10) * SIZE
    assert scene.elsewhere.grow_some(seq_id, BLOCK + 3, 10) == 1
    assert scene.elsewhere.grow_some(seq_id, 100_000, 0) == 2 + available * SIZE


def test_steps_that_fail_at_a_creditor(scene: Scene):
    seq_id = scene.long()
    scene.move(seq_id, 3)
    one, two, _ = scene.source.out
    elsewhere, name = scene.elsewhere, EngineId("b")
    assert elsewhere.recover(RuntimeError("another"), refusals=1) is None
    assert elsewhere.recover(PeerUnreachable("another"), refusals=1) is None
    assert scene.source.failures == []
    ended = CreditorFailed(name, [one.loan], StaleEpoch("ended"), lost=False)
    assert elsewhere.recover(ended, refusals=1) == (1, BLOCK)
    busy = CreditorFailed(name, [], NoCapacity("busy"), lost=False)
    assert elsewhere.recover(busy, refusals=1) == (0, 0)
    assert elsewhere.recover(busy, refusals=2) == (0, 0)
    assert elsewhere.away(seq_id) == 2
    other = CreditorFailed(EngineId("c"), [], PeerUnreachable("gone"), lost=True)
    other.also = (CreditorFailed(name, [two.loan], StaleEpoch("ended"), lost=False),)
    assert elsewhere.recover(other, refusals=1) == (1, BLOCK)
    assert elsewhere.recover(busy, refusals=3) == (1, BLOCK)
    assert elsewhere.away(seq_id) == 0
    assert scene.source.failures == [name, name, name, EngineId("c"), name, name]


def test_integrity_finds_holes_that_are_no_blocks(scene: Scene):
    seq_id = scene.long()
    scene.move(seq_id)
    sequence_ = scene.cache._sequences[seq_id]
    table = sequence_.table
    page = table.pages(PER_BLOCK, PER_BLOCK + 1)[0]
    table.fill([PER_BLOCK], [0])
    with pytest.raises(Internal, match="no page"):
        scene.cache.check_integrity()
    table.fill([PER_BLOCK], [page])
    table.fill([0], [page])
    with pytest.raises(Internal, match="local pages"):
        scene.cache.check_integrity()
    table.fill([0], [0])
    sequence_.length, length = 10, sequence_.length
    with pytest.raises(Internal, match="not present"):
        scene.cache.check_integrity()
    sequence_.length = length
    scene.cache.check_integrity()


def test_who_cannot_borrow():
    network = MemoryNetwork()
    small = memory_cache(network, 3 * PER_BLOCK - 1)
    remote = RemoteAttention(small.identity, AttentionShape.of(small.layout, HEADS))
    with pytest.raises(BadRequest, match="pages of its own"):
        small.borrow(OneCreditor(small), remote)
    assert small.elsewhere is None
    stores: Any = [memory_cache(network, PAGES).store]
    with pytest.raises(Unsupported):
        ShardedPageStore(stores).borrow(remote)


def test_pins_leave_room_for_two_blocks_of_a_long_context(scene: Scene):
    """More of it need not be here at a time."""
    pinned = [(3 * i) % 400 for i in range(2 * BLOCK)]
    seq_id = sequence(scene.cache, 1, pinned)
    scene.cache.publish(seq_id, pinned)
    scene.cache.remove_sequence(seq_id)
    assert scene.cache.pin(pinned) == 2 * BLOCK
    scene.cache.check_room(list(range(400)) * 20)
    plain = memory_cache(MemoryNetwork(), PAGES)
    seq_id = sequence(plain, 1, pinned)
    plain.publish(seq_id, pinned)
    plain.pin(pinned)
    with pytest.raises(NoCapacity):
        plain.check_room(list(range(400)) * 2)
    plain.close()
