"""The lease table alone, over real memory; `test_cache.py` tests leases in a KVCache."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import cast

import pytest
from kv_helpers import small_layout

from kvcache.errors import KVIncomplete, LeaseExpired, NoCapacity, UnknownLease
from kvcache.lease.control_slots import (
    CLAIM,
    LANDED,
    NONCE,
    RENEWALS,
    SLOTS,
    WORDS,
    ControlSlots,
)
from kvcache.lease.table import REMEMBERED, LeaseTable, ReceiveLease
from kvcache.memory.region import LocalRegion
from kvcache.types import LeaseId, PageId, SlotIndex

PAGES = [PageId(3), PageId(4)]


class Leases:
    """A lease table, its memory, and minimal leases."""

    def __init__(self) -> None:
        self.region = LocalRegion(small_layout(8))
        self.table = LeaseTable(self.region)

    def open(self, tokens: int = 8, begin: int = 0, now: float = 0.0) -> ReceiveLease:
        return self.table.open("r", list(range(tokens)), 0, [], begin, list(PAGES), 10.0, now)


@pytest.fixture
def leases() -> Leases:
    return Leases()


def test_an_open_lease_is_in_memory(leases: Leases):
    lease = leases.open(begin=4)
    words = leases.region.slots[lease.slot]
    assert int(words[NONCE]) == lease.nonce != 0
    assert int(words[LANDED]) == 4
    assert int(words[CLAIM]) == int(words[RENEWALS]) == 0
    assert lease.state == "reserved"
    assert leases.table.leased == 2


def test_the_watermark_is_reread(leases: Leases):
    lease = leases.open()
    leases.region.slots[lease.slot, LANDED] = 8
    assert leases.table.get(lease.lease_id).landed == 8
    assert leases.table.live()[0].state == "landed"


@pytest.mark.parametrize(("written", "read"), [(0, 4), (3, 4), (6, 6), (9, 8), (2**64 - 1, 8)])
def test_a_faulty_watermark_is_bounded_by_what_was_matched_and_by_the_room(
    leases: Leases, written: int, read: int
):
    lease = leases.open(begin=4)
    watch = leases.table.watch([lease])
    leases.region.slots[lease.slot, LANDED] = written
    assert leases.table.get(lease.lease_id).landed == read
    landed, live = watch.read()
    assert (landed.tolist(), live.tolist()) == ([read], [True])


def test_an_empty_lease_has_landed_at_once(leases: Leases):
    assert leases.open(tokens=0).state == "landed"


def test_ended_and_unknown_leases_differ(leases: Leases):
    lease = leases.open()
    assert leases.table.close(lease) == PAGES
    with pytest.raises(LeaseExpired):
        leases.table.get(lease.lease_id)
    with pytest.raises(UnknownLease):
        leases.table.get(LeaseId("never"))


def test_the_memory_of_ended_leases_is_bounded(leases: Leases):
    first, second = leases.open(), leases.open()
    leases.table.close(first)
    leases.table.close(second)
    for _ in range(REMEMBERED - 1):
        leases.table.close(leases.open())
    with pytest.raises(UnknownLease):
        leases.table.get(first.lease_id)
    with pytest.raises(LeaseExpired):
        leases.table.get(second.lease_id)


def test_slots_run_out_and_come_back(leases: Leases):
    opened = [leases.open() for _ in range(SLOTS)]
    assert len({lease.slot for lease in opened}) == SLOTS
    with pytest.raises(NoCapacity):
        leases.open()
    leases.table.close(opened[5])
    assert leases.open().slot == opened[5].slot


def test_a_closed_slot_is_closed_in_memory(leases: Leases):
    lease = leases.open()
    leases.table.close(lease)
    assert int(leases.region.slots[lease.slot, NONCE]) == 0


def test_a_writer_keeps_the_pages_in_quarantine(leases: Leases):
    lease = leases.open()
    assert leases.region.try_acquire_right(lease.slot)
    assert leases.table.close(lease) == []
    assert leases.table.quarantined == 2
    assert leases.table.leased == 0
    assert list(leases.table.holders()) == [PAGES]
    assert leases.table.sweep() == []
    assert leases.open().slot != lease.slot  # the slot is not reused either
    leases.region.release_right(lease.slot)
    assert leases.table.sweep() == PAGES
    assert leases.table.quarantined == 0
    assert leases.table.sweep() == []


def test_taking_over_ends_the_lease(leases: Leases):
    lease = leases.open()
    leases.table.take_over(lease)
    assert int(leases.region.slots[lease.slot, NONCE]) == 0
    assert leases.region.try_acquire_right(lease.slot)
    with pytest.raises(LeaseExpired):
        leases.table.get(lease.lease_id)


def test_taking_over_from_a_writer_changes_nothing(leases: Leases):
    lease = leases.open()
    assert leases.region.try_acquire_right(lease.slot)
    seen: list[int] = []
    try_acquire_right = leases.region.try_acquire_right

    def watched(slot: int) -> bool:
        seen.append(int(leases.region.slots[slot, NONCE]))
        return try_acquire_right(slot)

    leases.region.try_acquire_right = watched  # type: ignore[method-assign]
    with pytest.raises(KVIncomplete):
        leases.table.take_over(lease)
    assert seen == [lease.nonce]  # the writer never saw the lease closed
    assert leases.table.get(lease.lease_id) is lease


def test_a_lease_without_a_writer_expires(leases: Leases):
    lease = leases.open(now=0.0)
    assert leases.table.expired(10.0) == []
    assert leases.table.expired(10.1) == [lease]


def test_signs_of_life_renew(leases: Leases):
    lease = leases.open(now=0.0)
    leases.region.slots[lease.slot, RENEWALS] += 1
    assert (
        leases.table.expired(50.0) == []
    )  # the sign of life is read before the deadline is checked
    assert lease.deadline == 60.0
    assert leases.table.expired(61.0) == [lease]


def test_reading_a_lease_does_not_hide_a_sign_of_life(leases: Leases):
    lease = leases.open(now=0.0)
    leases.region.slots[lease.slot, LANDED] = 8
    leases.region.slots[lease.slot, RENEWALS] += 1
    leases.table.live()
    assert leases.table.expired(50.0) == []


def test_a_slot_returns_after_its_quarantine(leases: Leases):
    lease = leases.open()
    assert leases.region.try_acquire_right(lease.slot)
    leases.table.close(lease)
    leases.region.release_right(lease.slot)
    assert leases.table.sweep() == PAGES
    assert leases.open().slot == lease.slot


def test_a_slot_returns_after_its_lease_is_taken_over(leases: Leases):
    lease = leases.open()
    assert leases.table.take_over(lease) == PAGES
    assert leases.open().slot == lease.slot


def test_a_lease_does_not_start_with_the_words_of_the_slots_former_lease(leases: Leases):
    former = leases.open()
    words = leases.region.slots[former.slot]
    words[[CLAIM, LANDED, RENEWALS]] = 7, 8, 9
    leases.table.close(former)
    lease = leases.open(begin=4)
    assert lease.slot == former.slot
    assert words[[CLAIM, LANDED, RENEWALS]].tolist() == [0, 4, 0]
    assert leases.table.expired(10.1) == [lease]  # old renewals are no sign of life


def test_a_lease_is_open_once_its_other_words_are_there(monkeypatch: pytest.MonkeyPatch):
    """A sender with the new address may look at any moment. A nonce is never that of no lease."""
    written: list[int] = []

    class Words(dict[int, int]):
        def __setitem__(self, word: int, value: int) -> None:
            written.append(word)
            super().__setitem__(word, value)

    monkeypatch.setattr("kvcache.lease.table.secrets.randbits", lambda bits: 0)
    control = SimpleNamespace(
        slots=defaultdict(Words),
        try_acquire_right=lambda slot: True,
        release_right=lambda slot: None,
    )
    lease = LeaseTable(cast(ControlSlots, control)).open("r", [1], 0, [], 0, [], 1.0, 0.0)
    assert sorted(written) == sorted([NONCE, CLAIM, LANDED, RENEWALS])
    assert written[-1] == NONCE
    assert lease.nonce == control.slots[lease.slot][NONCE] == 1


def test_a_lease_is_closed_before_its_right_is_tried(leases: Leases):
    """The other way round, a sender could get the right in between and write."""
    lease = leases.open()
    seen: list[int] = []
    try_acquire_right = leases.region.try_acquire_right

    def watched(slot: SlotIndex) -> bool:
        seen.append(int(leases.region.slots[slot, NONCE]))
        return try_acquire_right(slot)

    leases.region.try_acquire_right = watched  # type: ignore[method-assign,assignment]
    assert leases.table.close(lease) == PAGES
    assert seen == [0]
    leases.region.try_acquire_right = try_acquire_right  # type: ignore[method-assign]
    assert leases.region.try_acquire_right(lease.slot)  # the table does not keep it


def test_the_words_of_a_slot_stand_where_peers_write_them():
    """Peers are other processes, and may be of another release."""
    assert (NONCE, CLAIM, LANDED, RENEWALS) == (0, 1, 2, 3)
    assert (WORDS, SLOTS) == (8, 1024)
