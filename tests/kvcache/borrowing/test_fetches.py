"""Blocks that come home: called back, ordered, or cheaper here; and what ends them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from kv_helpers import LAYERS, SIZE, kv_of, sequence
from one_creditor import PAGES, PER_BLOCK, TOKENS, Scene

from kvcache.attention import BLOCK
from kvcache.borrowing import HomeOrder
from kvcache.errors import Internal, LeaseExpired, PeerUnreachable
from kvcache.lease import KVAddress
from kvcache.remote_attention import Estimate, MeasuredFetchCost
from kvcache.types import EngineId, SeqId

B = EngineId("b")


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    while made.source.asked_home:
        made.source.answer()
    made.elsewhere.settle()
    made.arrive()
    made.cache.sweep()
    assert not made.cache.page_use().quarantined
    made.close()


def call_back(scene: Scene, *places: int) -> None:
    """Call back the loans of blocks, by their places among those lent."""
    out = scene.source.out
    scene.source.on_called_back(B, [out[place].loan for place in places or range(len(out))])
    assert scene.elsewhere.take_losses() == (0, 0)
    scene.elsewhere.settle()


def local_kv_is_right(scene: Scene, seq_id: SeqId, number: int) -> None:
    pages = scene.cache._sequences[seq_id].table.pages(number * PER_BLOCK, (number + 1) * PER_BLOCK)
    begin = number * BLOCK
    for layer in range(LAYERS):
        held = scene.cache.store.pool[layer, pages].transpose(1, 2).flatten(0, 1)  # type: ignore[attr-defined]
        assert torch.equal(held, kv_of(TOKENS[begin : begin + BLOCK], layer, begin))


def ordered(scene: Scene, blocks: int, epoch: int = 1) -> tuple[HomeOrder, list[int]]:
    told: list[int] = []
    order = HomeOrder(B, epoch, blocks, lambda: told.append(order.home))
    scene.elsewhere.order_home(order)
    scene.elsewhere.settle()
    return order, told


def test_a_block_that_is_called_back_comes_home_with_its_kv(scene: Scene):
    seq_id = scene.long()
    scene.move(seq_id, 2)
    available = scene.cache.available
    call_back(scene, 0)
    assert scene.cache.available == available - PER_BLOCK
    assert scene.elsewhere.called_back(seq_id) == 1
    assert scene.elsewhere.away(seq_id) == 2  # as long as its KV has not landed
    scene.cache.check_integrity()
    scene.source.answer()
    assert scene.elsewhere.away(seq_id) == 2  # until the next step
    assert scene.elsewhere.settle() == 1
    assert scene.elsewhere.away(seq_id) == 1 and scene.elsewhere.called_back(seq_id) == 0
    assert scene.elsewhere.home == {"called_back": 1}
    assert scene.elsewhere.local_pages(seq_id) == 2 * PER_BLOCK + 3  # of three blocks, and a rest
    local_kv_is_right(scene, seq_id, 0)
    assert scene.creditor.bookkeeping.lender.lent == PER_BLOCK
    assert scene.cache.length(seq_id) == len(TOKENS)
    scene.cache.check_integrity()
    scene.cache.fork_sequence(seq_id, SeqId(2), BLOCK)  # as any block that was never away
    scene.cache.remove_sequence(SeqId(2))
    scene.move(seq_id)
    assert scene.elsewhere.away(seq_id) == 2


@pytest.mark.parametrize("cause", ["called back", "ordered"])
def test_a_creditor_that_refuses(scene: Scene, cause: str):
    """A block that is called back is lost at once; another one stays where it is."""
    seq_id = scene.long()
    scene.move(seq_id, 3)
    available = scene.cache.available
    if cause == "called back":
        call_back(scene, 1)
    else:
        order, told = ordered(scene, 1)
    _, _, done = scene.source.asked_home.pop()
    done(PeerUnreachable("no"))
    if cause == "called back":
        scene.elsewhere.settle()
        assert not scene.source.asked_home  # it is not asked again
        assert scene.elsewhere.take_losses() == (1, BLOCK)
        assert scene.cache.length(seq_id) == BLOCK
        assert scene.elsewhere.away(seq_id) == 2
    else:
        assert scene.elsewhere.take_losses() == (0, 0)
        for _ in range(2):  # it tries again, and then gives up
            scene.elsewhere.settle()
            assert told == []
            _, _, done = scene.source.asked_home.pop()
            done(PeerUnreachable("no"))
        scene.elsewhere.settle()
        assert told == [0] and order.failures == 3
        assert scene.elsewhere.away(seq_id) == 3 and not scene.source.asked_home
    scene.elsewhere.settle()
    assert scene.cache.available == available
    scene.cache.check_integrity()


def test_pages_that_the_creditor_may_still_write_are_quarantined(scene: Scene):
    seq_id = scene.long()
    scene.move(seq_id, 1)
    available = scene.cache.available
    call_back(scene)
    _, address, done = scene.source.asked_home.pop()
    slot = KVAddress.verify(address, b"secret").slot
    assert scene.cache.store.slots.try_acquire_right(slot)  # as a creditor that is stopped
    done(PeerUnreachable("no complete reply"))
    assert scene.elsewhere.take_losses() == (1, BLOCK)
    scene.cache.sweep()
    assert scene.cache.page_use().quarantined == PER_BLOCK
    assert scene.cache.available == available - PER_BLOCK
    scene.cache.check_integrity()
    scene.cache.store.slots.release_right(slot)
    scene.cache.sweep()
    assert scene.cache.available == available


def test_a_block_whose_answer_is_lost_counts_if_it_has_landed(scene: Scene):
    seq_id = scene.long()
    scene.move(seq_id, 1)
    call_back(scene)
    told = scene.source.asked_home[0]
    said: list[object] = []
    scene.source.asked_home[0] = (*told[:2], said.append)
    scene.source.answer()
    assert said == [None]
    told[2](PeerUnreachable("no complete reply"))
    assert scene.elsewhere.take_losses() == (0, 0)
    assert scene.elsewhere.settle() == 1
    local_kv_is_right(scene, seq_id, 0)


@pytest.mark.parametrize("answered", [False, True])
def test_a_sequence_that_ends_meanwhile(scene: Scene, answered: bool):
    """Its landings end at once; a creditor that comes late writes nothing."""
    seq_id = scene.long()
    scene.move(seq_id, 2)
    call_back(scene)
    failures: list[BaseException | None] = []
    asked = scene.source.asked_home[:]
    scene.source.asked_home = [(block, kv_addr, failures.append) for block, kv_addr, _ in asked]
    if answered:
        scene.source.answer()
    scene.cache.remove_sequence(seq_id)
    again = sequence(scene.cache, 1, TOKENS[:BLOCK])  # preempted, and begun again
    assert scene.elsewhere.settle() == 0
    assert scene.cache.available == PAGES - PER_BLOCK
    assert scene.source.out == []
    scene.cache.check_integrity()
    while scene.source.asked_home:
        scene.source.answer()
    assert isinstance(failures[-1], LeaseExpired)
    assert scene.elsewhere.away(again) == 0 and not scene.elsewhere.home


def test_a_loan_that_ends_while_its_block_is_on_its_way(scene: Scene):
    seq_id = scene.long()
    scene.move(seq_id, 1)
    call_back(scene)
    scene.source.on_lost(B, [scene.source.out[0].loan])
    assert scene.elsewhere.take_losses() == (1, BLOCK)
    assert scene.elsewhere.settle() == 0
    assert scene.cache.length(seq_id) == 0
    scene.cache.check_integrity()


def test_a_block_that_has_landed_when_its_loan_ends_is_not_lost(scene: Scene):
    seq_id = scene.long()
    scene.move(seq_id, 1)
    call_back(scene)
    loan = scene.source.out[0].loan
    scene.source.answer()
    scene.source.on_lost(B, [loan])
    assert scene.elsewhere.take_losses() == (0, 0)
    assert scene.elsewhere.settle() == 1
    assert scene.cache.length(seq_id) == len(TOKENS)


def test_a_block_waits_for_room_for_a_second_and_longer_if_others_come_home(scene: Scene):
    seq_id = scene.long()
    scene.move(seq_id, 2)
    pages = scene.cache.bookkeeping.pages
    held = pages.take(scene.cache.available - PER_BLOCK)  # the sequence keeps one to grow into
    call_back(scene)
    assert scene.elsewhere.lacking == 2 * PER_BLOCK and not scene.source.asked_home
    scene.now += 0.9
    assert scene.elsewhere.take_losses() == (0, 0)
    pages.drop([held.pop()])
    scene.elsewhere.settle()
    assert scene.elsewhere.lacking == PER_BLOCK
    scene.source.answer()
    scene.now += 0.2
    assert scene.elsewhere.settle() == 1
    assert scene.elsewhere.take_losses() == (0, 0)
    scene.now += 1.0
    assert scene.elsewhere.take_losses() == (1, BLOCK)
    assert scene.cache.length(seq_id) == BLOCK
    pages.drop(held)


def test_a_fetch_that_never_ends_is_given_up(scene: Scene):
    seq_id = scene.long()
    scene.move(seq_id, 1)
    order, told = ordered(scene, 1)
    scene.now += 60.0
    assert scene.elsewhere.settle() == 0
    assert order.failures == 1 and told == []
    scene.cache.check_integrity()
    scene.elsewhere.cancel_order(order)


def test_an_order_brings_as_many_blocks_home_as_it_says_as_pages_come_free(scene: Scene):
    seq_id = scene.long()
    scene.move(seq_id, 3)
    pages = scene.cache.bookkeeping.pages
    held = pages.take(scene.cache.available - PER_BLOCK - 1)
    order, told = ordered(scene, 2)
    assert order.under_way == 1
    scene.source.answer()
    assert scene.elsewhere.settle() == 1
    assert order.home == 1 and not scene.source.asked_home and told == []
    pages.drop(held[:PER_BLOCK])
    scene.elsewhere.settle()
    scene.source.answer()
    scene.elsewhere.settle()
    assert told == [2] and scene.elsewhere.away(seq_id) == 1
    assert scene.elsewhere.came_to_stay(seq_id) == 2
    assert scene.elsewhere.home == {"swap": 2}
    pages.drop(held[PER_BLOCK:])
    scene.elsewhere.settle()
    assert not scene.source.asked_home and told == [2]


def test_an_order_without_such_blocks_is_done_at_once_and_a_cancelled_one_never(scene: Scene):
    assert ordered(scene, 5)[1] == [0]
    seq_id = scene.long()
    scene.move(seq_id, 1)
    assert ordered(scene, 5, epoch=2)[1] == [0]
    order, told = ordered(scene, 5)
    scene.elsewhere.cancel_order(order)
    scene.source.answer()
    assert scene.elsewhere.settle() == 1  # it comes home nevertheless
    scene.elsewhere.settle()
    assert told == [] and scene.elsewhere.away(seq_id) == 0


def test_what_is_cheaper_comes_home_if_there_is_room_for_all_of_it(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
):
    asked: list[tuple[object, ...]] = []

    def cheaper(self: MeasuredFetchCost, *question: object) -> bool:
        asked.append(question)
        return len(asked) > 1

    monkeypatch.setattr(MeasuredFetchCost, "cheaper", cheaper)
    seq_id = scene.long()
    scene.move(seq_id, 2)
    room = scene.cache.available - 2 * PER_BLOCK
    assert scene.elsewhere.fetch_cheaper(seq_id, 70, 50, room + 1) == 0
    assert asked == []
    assert scene.elsewhere.fetch_cheaper(seq_id, 70, 50, room) == 0
    assert scene.elsewhere.fetch_cheaper(seq_id, 70, 50, room) == 2
    assert scene.elsewhere.fetch_cheaper(seq_id, 70, 50, room) == 2
    assert asked == [(B, 2, 70, 50)] * 2
    scene.source.answer()
    scene.source.asked_home.pop()[2](PeerUnreachable("busy"))
    assert scene.elsewhere.settle() == 1
    assert scene.elsewhere.fetch_cheaper(seq_id, 70, 50, 0) == 0
    scene.now += 5.0  # it has rested
    assert scene.elsewhere.fetch_cheaper(seq_id, 70, 50, 0) == 1
    scene.source.answer()
    assert scene.elsewhere.settle() == 1
    assert scene.elsewhere.home == {"cheaper": 2}
    assert scene.elsewhere.came_to_stay(seq_id) == 2


def test_few_blocks_of_a_creditor_are_on_their_way_at_a_time(scene: Scene):
    tokens = [(3 * i) % 400 for i in range(BLOCK)]
    for number in range(2, 8):
        seq_id = sequence(scene.cache, number, tokens)
        scene.move(seq_id)
    call_back(scene)
    assert len(scene.source.asked_home) == 3  # there is room for these
    for number in range(2, 8):
        scene.cache.remove_sequence(SeqId(number))
    scene.elsewhere.settle()
    assert scene.cache.available == PAGES


def test_integrity_finds_a_landing_without_a_fetch(scene: Scene):
    seq_id = scene.long()
    scene.move(seq_id, 1)
    call_back(scene)
    scene.cache.check_integrity()
    landings = scene.cache.bookkeeping.landings
    stray = landings.open(scene.cache.bookkeeping.pages.take(1))
    with pytest.raises(Internal, match="no fetch"):
        scene.cache.check_integrity()
    scene.cache.bookkeeping.pages.drop(landings.abandon(stray))


def estimate(**known: float) -> Estimate:
    values = {"latency_s": 0.0, "s_per_byte": 0.0, "s_per_row_key": 0.0, "waited_s": 0.0}
    return Estimate(**{**values, **known}, samples=int(bool(known)))


def test_cost_in_bytes_where_nothing_is_measured(scene: Scene, monkeypatch: pytest.MonkeyPatch):
    """The inequality of the paper: `L_q·(2·H·d·b + 8·H) < 2·n·H_kv·d·b` ships."""
    cost, shape = MeasuredFetchCost(scene.remote, BLOCK), scene.remote.shape
    assert not cost.cheaper(B, 1, 1 << 30, 1)  # it is not connected
    monkeypatch.setattr(scene.remote, "estimate", lambda creditor: estimate())
    width = shape.head_dim * 4
    row = 2 * shape.heads * width + 8 * shape.heads
    for blocks in (1, 3):
        even = 2 * blocks * BLOCK * shape.kv_heads * width / row
        assert not cost.cheaper(B, blocks, int(even) - 1, 1)
        assert cost.cheaper(B, blocks, int(even) + 1, 1)


def test_cost_in_time_where_it_is_measured(scene: Scene, monkeypatch: pytest.MonkeyPatch):
    """`layers · (steps · (latency + wait) + rows · row_bytes / bandwidth) > n · fetch_s`."""
    cost, shape = MeasuredFetchCost(scene.remote, BLOCK), scene.remote.shape
    known = estimate(latency_s=1e-4, waited_s=1e-4, s_per_byte=1e-9)
    monkeypatch.setattr(scene.remote, "estimate", lambda creditor: known)
    row = 2 * shape.query_bytes + 8 * shape.heads
    cost.fetched(B, 1.0)
    shipped_s = shape.layers * (40 * 2e-4 + 60 * row * 1e-9)
    assert cost.cheaper(B, 1, 60, 40) == (shipped_s > 1.0) == False  # noqa: E712
    for _ in range(200):
        cost.fetched(B, shipped_s / 2.5)
    assert cost.cheaper(B, 2, 60, 40)
    assert not cost.cheaper(B, 3, 60, 40)
    other = EngineId("c")  # nothing has been fetched from it: at the bandwidth of the exchanges
    block_s = shape.layers * 2 * BLOCK * shape.kv_heads * shape.head_dim * 4 * 1e-9
    most = int(shipped_s / block_s)
    assert cost.cheaper(other, most, 60, 40) and not cost.cheaper(other, most + 1, 60, 40)
    assert SIZE * PER_BLOCK == BLOCK
