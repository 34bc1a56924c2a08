"""Loans of a real cache: their pages, their signed addresses, and writes into them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kv_helpers import SIZE, Clock, HeldUpCopies, cached, compute, kv_of, memory_cache, sequence

from kvcache.cache import KVCache
from kvcache.errors import BadAddress, BadRange, LeaseExpired, NoCapacity, UnknownLease
from kvcache.lease import SLOTS, KVAddress
from kvcache.lending.lender import MAX_LOANS
from kvcache.transport import MemoryNetwork
from kvcache.types import EngineId, LeaseId, PageId, SeqId

PAGES, EPOCH, LOAN_S = 32, 1, 10.0
B = EngineId("b")
ONE = LeaseId("1")
PROMPT = list(range(100, 122))


@pytest.fixture
def network() -> MemoryNetwork:
    return MemoryNetwork()


@pytest.fixture
def creditor(network: MemoryNetwork, clock: Clock) -> Iterator[KVCache]:
    cache = memory_cache(network, PAGES, name="a", clock=clock, lend_pages=16, loan_s=LOAN_S)
    yield cache
    cache.check_integrity()
    cache.close()


@pytest.fixture
def debtor(network: MemoryNetwork, clock: Clock) -> Iterator[KVCache]:
    cache = memory_cache(network, PAGES, name="b", clock=clock)
    yield cache
    cache.check_integrity()
    cache.close()


def lend(cache: KVCache, size: int, lease_id: str = ONE) -> str:
    with cache.lock:
        address = cache.bookkeeping.lend(B, 1, LeaseId(lease_id), size, at=EPOCH)
    assert address is not False
    return address


def free(cache: KVCache, pages: list[PageId] | None = None) -> tuple[int, str | None]:
    with cache.lock:
        return cache.bookkeeping.take_back(B, 1, ONE, pages, at=EPOCH)


def test_lent_pages_have_an_owner_and_a_signed_address(creditor: KVCache):
    address = KVAddress.verify(lend(creditor, 5), b"secret")
    assert (address.engine_id, address.epoch) == ("a", EPOCH)
    assert address.pages() == [1, 2, 3, 4, 5]
    assert (address.begin, address.end, address.room) == (0, 0, 5 * SIZE)
    use = creditor.page_use()
    assert (use.lent, use.active, use.free) == (5, 0, PAGES - 5)
    creditor.check_integrity()
    with pytest.raises(BadAddress):
        KVAddress.verify(lend(creditor, 5)[:-4] + "AAAA", b"secret")


def test_a_sweep_ends_loans_past_their_deadline(creditor: KVCache, clock: Clock):
    lend(creditor, 5)
    clock.now += LOAN_S
    creditor.sweep()
    assert creditor.page_use().lent == 5
    clock.now += 0.1
    creditor.sweep()
    assert creditor.page_use().free == PAGES


def test_every_sequence_and_the_head_of_the_queue_keep_their_pages(creditor: KVCache):
    sequence(creditor, 1, range(20 * SIZE))
    creditor.reserve(8 * SIZE)
    with creditor.lock:  # 12 are free; the sequence may want one and the reservation eight
        assert creditor.bookkeeping.lender.lendable == 3
        assert creditor.bookkeeping.lend(B, 1, ONE, 4, at=EPOCH) is False
    lend(creditor, 3, "2")


def test_loans_take_cached_pages(creditor: KVCache):
    cached(creditor, 1, range(28 * SIZE))
    lend(creditor, 16)
    assert creditor.page_use().cached == 16


def test_a_loan_is_no_receive_lease(creditor: KVCache, debtor: KVCache):
    """Its address opens nothing but the loan's own pages."""
    lease, _ = creditor.prep_recv("r", PROMPT, 21, 0, 10.0)
    address = lend(creditor, 3, lease.lease_id)
    with pytest.raises(UnknownLease):
        creditor.extend(address, 4)
    with pytest.raises(BadRange):
        debtor.open_put(address, PROMPT, 0, 12)


def written(creditor: KVCache, debtor: KVCache, address: str) -> list[int]:
    """Write a sequence's KV into a loan as a mirror does; return the loan's pages."""
    sequence(debtor, 1, PROMPT[: 3 * SIZE])
    mirror = debtor.open_mirror(address, PROMPT)
    debtor.mirror(SeqId(1), mirror, 1)
    assert mirror.put is not None
    mirror.put.close().result(10)
    debtor.close_mirror(mirror)
    return list(KVAddress.verify(address, b"secret").pages())


def test_the_debtor_writes_into_lent_pages(creditor: KVCache, debtor: KVCache):
    pages = written(creditor, debtor, lend(creditor, 3))
    for layer in range(creditor.layout.layers):
        held = creditor.store.pool[layer, pages].transpose(1, 2).flatten(0, 1)
        assert held.equal(kv_of(PROMPT[: 3 * SIZE], layer))


@pytest.mark.parametrize("how", ["free", "part", "deadline", "restart"])
def test_no_write_into_an_ended_loan_begins(
    creditor: KVCache, debtor: KVCache, clock: Clock, how: str
):
    address = lend(creditor, 3)
    if how == "free":
        free(creditor)
    elif how == "part":
        free(creditor, [PageId(2)])
    elif how == "deadline":
        clock.now += LOAN_S + 1
        creditor.sweep()
    else:
        with creditor.lock:
            creditor.bookkeeping.lender.renew(B, 2, [], at=EPOCH)
    with pytest.raises(LeaseExpired):
        written(creditor, debtor, address)


def test_what_is_left_of_a_loan_has_another_address(creditor: KVCache, debtor: KVCache):
    lend(creditor, 5)
    freed, rest = free(creditor, [PageId(2), PageId(5), PageId(31)])
    assert freed == 2 and rest is not None
    assert written(creditor, debtor, rest) == [1, 3, 4]
    assert creditor.page_use().lent == 3
    again = KVAddress.verify(lend(creditor, 5), b"secret")  # a repeated message
    assert again.pages() == [1, 3, 4]
    assert free(creditor) == (3, None)
    assert creditor.page_use().free == PAGES


@pytest.mark.parametrize("pages", [None, [PageId(1), PageId(2)]])
def test_pages_are_quarantined_while_a_write_may_be_in_flight(
    creditor: KVCache,
    debtor: KVCache,
    clock: Clock,
    held_up: HeldUpCopies,
    pages: list[PageId] | None,
):
    address = lend(creditor, 3)
    sequence(debtor, 1, PROMPT[: 3 * SIZE])
    mirror = debtor.open_mirror(address, PROMPT)
    debtor.mirror(SeqId(1), mirror, 1)
    assert mirror.put is not None
    try:
        assert held_up.reached.wait(10)
        freed, _ = free(creditor, pages)
        for _ in range(10):
            clock.now += 1.0
            creditor.sweep()
        use = creditor.page_use()
        assert (use.quarantined, use.lent) == (freed, 3 - freed)
        creditor.check_integrity()
    finally:
        held_up.released.set()
    with pytest.raises(LeaseExpired):  # at its end the write finds the loan over
        mirror.put.close().result(10)
    clock.now += 2 * LOAN_S
    creditor.sweep()
    assert creditor.page_use().free == PAGES


def test_loans_leave_half_of_the_slots_to_leases(network: MemoryNetwork, clock: Clock):
    assert 2 * MAX_LOANS == SLOTS
    cache = memory_cache(network, MAX_LOANS + 8, clock=clock, lend_pages=MAX_LOANS + 8)
    for number in range(MAX_LOANS):
        lend(cache, 1, str(number))
    with cache.lock:
        assert cache.bookkeeping.lend(B, 1, LeaseId("more"), 1, at=EPOCH) is False
    cache.prep_recv("r", PROMPT, 21, 0, 10.0)
    cache.check_integrity()
    cache.close()


def test_without_a_slot_nothing_is_lent(creditor: KVCache, monkeypatch: pytest.MonkeyPatch):
    lend(creditor, 2)
    slots = creditor.bookkeeping.receiver.leases.slots
    monkeypatch.setattr(slots, "_free", [])
    with creditor.lock:
        assert creditor.bookkeeping.lend(B, 1, LeaseId("2"), 2, at=EPOCH) is False
    with pytest.raises(NoCapacity):  # what is left would have no slot
        free(creditor, [PageId(1)])
    assert creditor.page_use().lent == 2
    creditor.check_integrity()


# The creditor's own sequences


def awaited(cache: KVCache) -> int:
    with cache.lock:
        return cache.bookkeeping.lender.awaited


def test_as_many_pages_are_called_back_as_are_lacking(creditor: KVCache):
    for number in range(8):
        lend(creditor, 2, str(number))
    sequence(creditor, 1, range(14 * SIZE))
    assert not creditor.awaits_pages
    creditor.call_back(4 * SIZE)  # two are free, and the sequence may want one
    assert awaited(creditor) == 4 and creditor.awaits_pages
    creditor.call_back(4 * SIZE)
    assert awaited(creditor) == 4


def test_a_lease_without_room_calls_loans_back(creditor: KVCache):
    lend(creditor, 16)
    sequence(creditor, 1, range(12 * SIZE))
    creditor.prep_recv("small", PROMPT, 4, 0, 10.0)
    assert awaited(creditor) == 0
    with pytest.raises(NoCapacity):
        creditor.prep_recv("r", PROMPT, 21, 0, 10.0)
    assert awaited(creditor) == 16


def test_a_lease_that_leases_are_in_the_way_of_calls_nothing_back(creditor: KVCache):
    lend(creditor, 2)
    creditor.prep_recv("a", range(14 * SIZE), 14 * SIZE, 0, 10.0)  # 14 of at most 16
    with pytest.raises(NoCapacity, match="leases hold"):
        creditor.prep_recv("b", PROMPT, 21, 0, 10.0)
    assert awaited(creditor) == 0


def test_a_sequence_grows_into_pages_of_a_loan_past_its_deadline(creditor: KVCache, clock: Clock):
    lend(creditor, 16)
    sequence(creditor, 1, range(16 * SIZE))
    clock.now += LOAN_S + 1
    with pytest.raises(NoCapacity):
        creditor.grow(SeqId(1), 17 * SIZE)
    creditor.call_back(SIZE)
    assert not creditor.awaits_pages
    compute(creditor, SeqId(1), range(SIZE))
