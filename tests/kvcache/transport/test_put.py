"""`QueuedPut` alone: waits for its write right, and what its callers see when something fails."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from kv_helpers import (
    Clock,
    assert_content,
    cached,
    make_cache,
    memory_cache,
    pages_of,
    sequence,
)

from kvcache.cache import KVCache
from kvcache.errors import BadRange, Internal, LeaseExpired, Timeout
from kvcache.lease import KVAddress
from kvcache.memory import KVLayout
from kvcache.transport import MemoryNetwork, MemoryTransport
from kvcache.transport.mapped import MappedTarget
from kvcache.transport.put import RIGHT_POLL_S, RIGHT_TIMEOUT_S, QueuedPut
from kvcache.transport.target import Target
from kvcache.transport.worker import Task, Worker
from kvcache.types import PageId, SeqId, SlotIndex, TokenPos

Pair = tuple[KVCache, KVCache]
PROMPT = list(range(100, 122))


def open_put(pair: Pair) -> QueuedPut:
    sender, receiver = pair
    _, address = receiver.prep_recv("r", PROMPT, 21, 0, 10.0)
    put = sender.open_put(address, PROMPT, 0, 21)
    assert isinstance(put, QueuedPut)
    return put


def test_a_put_of_a_closed_transport_fails_every_future(pair: Pair):
    """Also those that other threads queue while one thread finds the transport closed."""
    put = open_put(pair)
    others: list[Future[None]] = []

    class Closed:
        def submit(self, task: Task) -> None:
            others.append(put.close())
            raise Internal("the transport is closed")

    put._worker = cast(Worker, cast(Any, Closed()))
    for done in (put.close(), *others):
        assert isinstance(done.exception(timeout=5), Internal)
    assert put.failed


def test_a_put_of_a_closed_transport_says_so_in_close_alone(pair: Pair):
    """Steps write, signal and renew: none of them must fail."""
    put = open_put(pair)
    pair[0].transport.close()
    put.write(range(2), [], TokenPos(0), TokenPos(4))
    put.signal(TokenPos(4))
    put.renew()
    assert put.failed
    assert isinstance(put.close().exception(timeout=5), Internal)


def test_a_cancelled_put_ends_if_its_device_has_failed(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    """An event that cannot be read would otherwise keep the pages for ever."""
    put = open_put(pair)

    def broken(self: MappedTarget, event: object) -> bool:
        raise RuntimeError("the device has failed")

    monkeypatch.setattr(MappedTarget, "record_event", lambda self: object())
    monkeypatch.setattr(MappedTarget, "event_done", broken)
    put.write(range(2), [], TokenPos(0), TokenPos(4))
    assert isinstance(put.close().exception(timeout=5), Internal)


class Right:
    """A `Target` of which only the write right is used; `free` says whether it can be had."""

    def __init__(self) -> None:
        self.free = True
        self.held = False

    def try_acquire_right(self, slot: int, share: int = 0) -> bool:
        self.held = self.free
        return self.free

    def release_right(self, slot: int) -> None:
        self.held = False


@pytest.fixture
def right(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[QueuedPut, Right, Clock]]:
    """An idle put, the right that it needs, and the clock that it waits by."""
    put, right, clock = open_put(pair), Right(), Clock()
    target, put._target = put._target, cast(Target, cast(Any, right))
    monkeypatch.setattr("kvcache.transport.put.time", SimpleNamespace(monotonic=clock))
    yield put, right, clock
    put._target = target


def test_two_short_waits_for_a_right_are_not_one_long_one(right: tuple[QueuedPut, Right, Clock]):
    """A mirror of an hour meets another holder now and then."""
    put, target, clock = right
    ran: list[bool] = []

    def attempt(*, free: bool) -> float | None:
        target.free = free
        return put._with_right(lambda: ran.append(target.held), share=put.claim)

    for _ in range(3):
        assert attempt(free=False) is not None
        clock.now += 0.9 * RIGHT_TIMEOUT_S
        assert attempt(free=False) is not None
        assert attempt(free=True) is None
    assert ran == [True] * 3 and not target.held
    assert attempt(free=False) is not None
    clock.now += 1.1 * RIGHT_TIMEOUT_S
    with pytest.raises(Timeout):
        attempt(free=False)


def test_waits_for_a_right_grow_and_are_never_the_same(right: tuple[QueuedPut, Right, Clock]):
    put, target, clock = right
    target.free = False
    # In lockstep, two writers could block each other for ever.
    assert len({put._with_right(pytest.fail, share=put.claim) for _ in range(9)}) == 9
    delays = []
    for _ in range(20):
        delays.append(put._with_right(pytest.fail, share=put.claim) or 0.0)
        clock.now += RIGHT_TIMEOUT_S / 20
    assert 0 < delays[0] < 2 * RIGHT_POLL_S
    assert RIGHT_TIMEOUT_S / 500 < delays[-1] < RIGHT_TIMEOUT_S / 50


def test_a_right_is_released_after_a_failure_too(right: tuple[QueuedPut, Right, Clock]):
    put, target, _ = right
    with pytest.raises(ZeroDivisionError):
        put._with_right(lambda: 1 / 0, share=put.claim)  # type: ignore[arg-type,return-value]
    assert not target.held


def test_a_claim_that_fails_unexpectedly_fails_its_call(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
):
    """Without an answer, the call would wait for ever."""

    def broken(self: MappedTarget, slot: int) -> None:
        raise RuntimeError("the memory is gone")

    monkeypatch.setattr(MappedTarget, "words", broken)
    with pytest.raises(Internal, match="the memory is gone"):
        open_put(pair)


def test_a_claim_over_a_closed_transport_fails(pair: Pair):
    pair[0].transport.close()
    with pytest.raises(Internal):
        open_put(pair)


def test_a_caller_that_stops_waiting_for_a_close_affects_no_other(pair: Pair):
    put, gate = open_put(pair), threading.Event()
    put._worker.submit(lambda: gate.wait(10) and None)
    gone, stays = put.close(), put.close()
    assert gone.cancel()
    gate.set()
    assert stays.result(timeout=5) is None
    assert not put.failed and put.close().exception(timeout=5) is None


def test_positions_before_those_of_the_lease_are_not_written(pair: Pair):
    """They are in pages of the receiver's prefix cache, which the address does not name."""
    sender, receiver = pair
    cached(receiver, 1, PROMPT[:8])
    pages = pages_of(sender, sequence(sender, 1, PROMPT))
    for begin, end in ((4, 12), (7, 9), (12, 8)):
        _, address = receiver.prep_recv("r", PROMPT, 21, 0, 10.0)
        put = sender.open_put(address, PROMPT, 8, 21)
        before = receiver.store.pool.clone()
        put.write(range(2), pages, TokenPos(begin), TokenPos(end))
        assert isinstance(put.close().exception(timeout=5), BadRange)
        assert torch.equal(receiver.store.pool, before)
        receiver.release(receiver.leases()[0].lease_id)


def test_a_claim_is_made_alone_and_writes_share_their_claims_right(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
):
    """Shared, the right of a claim would not exclude a writer of another process."""
    shares: list[int] = []
    acquire = MappedTarget.try_acquire_right

    def watched(self: MappedTarget, slot: SlotIndex, share: int = 0) -> bool:
        shares.append(share)
        return acquire(self, slot, share)

    monkeypatch.setattr(MappedTarget, "try_acquire_right", watched)
    put = open_put(pair)
    assert shares == [0]
    put.renew()
    put.close().result(5)
    assert shares == [0, put.claim] and put.claim != 0
    address = KVAddress.verify(pair[1]._receiver._address(pair[1].leases()[0]), b"secret")
    pair[0].transport.open(address, 0, join=put.claim)
    assert shares == [0, put.claim, put.claim]


def test_a_write_reads_the_table_as_it_was_when_it_was_queued(pair: Pair):
    sender, receiver = pair
    put, gate = open_put(pair), threading.Event()
    put._worker.submit(lambda: gate.wait(10) and None)
    pages = np.array(pages_of(sender, sequence(sender, 1, PROMPT)), dtype=np.int64)
    put.write(range(2), pages, TokenPos(0), TokenPos(4))
    own = receiver.leases()[0].own[0]
    expected = sender.store.pool[:, int(pages[0])].clone()
    pages[:] = 0
    gate.set()
    put.close().result(5)
    assert torch.equal(receiver.store.pool[:, own], expected)


def test_a_hold_of_the_right_copies_up_to_four_mebibytes():
    """Some 0.3 ms. Others wait for the right meanwhile."""
    layout = KVLayout(1, 33, 4, 1, 1 << 15, torch.float32)  # pages of 1 MiB
    network = MemoryNetwork()
    sender, receiver = (make_cache(MemoryTransport(network, 1), layout, name=n) for n in "sr")
    _, address = receiver.prep_recv("r", PROMPT, 21, 30, 10.0)
    put = sender.open_put(address, PROMPT, 0, 21)
    assert isinstance(put, QueuedPut)
    copied: list[int] = []
    put._target.copy = lambda runs: copied.append(int(runs[:, 2].sum()))  # type: ignore[method-assign]
    pages = [PageId(page) for page in range(1, 14)]
    for end, holds in ((8 * 4, [4, 4]), (9 * 4, [3, 3, 3])):
        copied.clear()
        put.write(range(1), pages, TokenPos(0), TokenPos(end))
        put.close().result(10)
        assert [size >> 20 for size in copied] == holds
    receiver.release(receiver.leases()[0].lease_id)
    sender.close()
    receiver.close()


def test_a_put_behind_a_matched_prefix_lands_in_the_leases_own_pages(pair: Pair):
    sender, receiver = pair
    cached(receiver, 7, PROMPT[:8])
    lease, address = receiver.prep_recv("r", PROMPT, 21, 0, 10.0)
    assert lease.begin == 8
    put = sender.open_put(address, PROMPT, 8, 21)
    put.write(range(2), pages_of(sender, sequence(sender, 1, PROMPT)), TokenPos(8), TokenPos(21))
    put.signal(TokenPos(21))
    put.close().result(5)
    receiver.start_lease(lease.lease_id, SeqId(2), PROMPT, 21)
    assert_content(receiver, SeqId(2), PROMPT[:21])


# Claims


def test_a_claim_begins_at_the_watermark(pair: Pair):
    put = open_put(pair)
    put.signal(TokenPos(8))
    put.close().result(5)
    address = KVAddress.verify(pair[1]._receiver._address(pair[1].leases()[0]), b"secret")
    for begin in (0, 7, 9):
        with pytest.raises(BadRange):
            pair[0].transport.open(address, begin)
    assert not put.failed
    put.renew()
    put.close().result(5)  # those claims were not made
    pair[0].transport.open(address, 8)
    put.renew()
    assert isinstance(put.close().exception(timeout=5), LeaseExpired)


def test_a_claim_begins_at_a_high_watermark_too():
    network, prompt = MemoryNetwork(), list(range(400))
    sender, receiver = (memory_cache(network, 300, name=name) for name in "sr")
    _, address = receiver.prep_recv("r", prompt, 400, 0, 10.0)
    put = sender.open_put(address, prompt, 0, 400)
    put.signal(TokenPos(333))
    put.close().result(5)
    sender.open_put(address, prompt, 333, 400)
    receiver.release(receiver.leases()[0].lease_id)
    sender.close()
    receiver.close()


@pytest.mark.parametrize("bits", [0, 1])
def test_a_claim_is_never_zero(pair: Pair, monkeypatch: pytest.MonkeyPatch, bits: int):
    """Zero stands for no claim, and for an exclusive right."""
    monkeypatch.setattr("kvcache.transport.put.secrets", SimpleNamespace(randbits=lambda n: bits))
    assert open_put(pair).claim > 0


def test_claims_differ(pair: Pair):
    put = open_put(pair)
    address = KVAddress.verify(pair[1]._receiver._address(pair[1].leases()[0]), b"secret")
    other = pair[0].transport.open(address, 0)
    assert other.claim != put.claim
    with pytest.raises(LeaseExpired):
        pair[0].transport.open(address, 0, join=put.claim)


def test_a_right_is_waited_for_two_seconds(right: tuple[QueuedPut, Right, Clock]):
    """Another holder copies for less than a millisecond, unless its process is stopped."""
    put, target, clock = right
    target.free = False
    assert 0 < (put._with_right(pytest.fail, share=put.claim) or 0) < 0.002
    clock.now += 2.0
    assert put._with_right(pytest.fail, share=put.claim) is not None
    clock.now += 0.1
    with pytest.raises(Timeout):
        put._with_right(pytest.fail, share=put.claim)


@pytest.mark.parametrize(("drawn", "factor"), [(0.0, 0.5), (0.5, 1.0), (1.0, 1.5)])
def test_a_wait_for_a_right_is_a_hundredth_of_the_time_waited(
    right: tuple[QueuedPut, Right, Clock],
    monkeypatch: pytest.MonkeyPatch,
    drawn: float,
    factor: float,
):
    put, target, clock = right
    target.free = False
    monkeypatch.setattr("kvcache.transport.put.random", SimpleNamespace(random=lambda: drawn))
    for waited in (0.0, 1.0):
        clock.now = 1000.0 + waited
        delay = put._with_right(pytest.fail, share=put.claim)
        assert delay == pytest.approx((0.0005 + waited / 100) * factor)


def test_a_host_has_computed_everything_that_it_was_told(pair: Pair):
    target = open_put(pair)._target
    assert target.record_event() is None and target.event_done(None)
