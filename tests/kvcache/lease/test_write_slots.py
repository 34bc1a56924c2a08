"""Which slot a lease gets."""

from __future__ import annotations

import pytest
import torch

from kvcache.errors import NoCapacity
from kvcache.lease import SLOTS, WriteSlots
from kvcache.memory import KVLayout, LocalRegion


@pytest.fixture
def region() -> LocalRegion:
    return LocalRegion(KVLayout(1, 2, 16, 1, 16, torch.float32))


def test_a_slot_that_a_late_sender_holds_is_not_opened(region: LocalRegion):
    """It may be stopped between taking the right and finding the lease gone."""
    slots = WriteSlots(region)
    second, first, *_ = (slots.open(0)[0] for _ in range(SLOTS))
    assert slots.close(second, []) == slots.close(first, []) == []  # `first` would be next
    assert region.try_acquire_right(first)
    assert slots.open(0)[0] == second
    with pytest.raises(NoCapacity):
        slots.open(0)
    region.release_right(first)
    assert slots.open(0)[0] == first
