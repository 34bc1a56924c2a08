"""Memory is faulted in before it is used, in the background."""

from __future__ import annotations

import os
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch

from kvcache.memory import prefault as populate
from kvcache.memory.layout import KVLayout
from kvcache.memory.prefault import Prefaulter
from kvcache.memory.region import SharedRegion

LAYOUT = KVLayout(
    layers=4, pages=1024, page_size=16, kv_heads=2, head_dim=32, dtype=torch.float32
)  # 32 MiB


def resident(region: SharedRegion) -> int:
    """Return how many bytes of the pool are in this process's page table."""
    begin, found = region.pool.data_ptr(), False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head:
            low, high = (int(part, 16) for part in head.split("-"))
            found = low <= begin < high
        elif found and head == "Rss:":
            return int(line.split()[1]) << 10
    raise AssertionError("the pool is not mapped")


def wait_for(region: SharedRegion) -> None:
    give_up = time.monotonic() + 20
    while resident(region) < LAYOUT.nbytes:
        assert time.monotonic() < give_up
        time.sleep(0.005)


def test_a_pool_and_a_peers_mapping_are_faulted_in():
    own = SharedRegion.create(LAYOUT, epoch=1)
    assert resident(own) < LAYOUT.nbytes / 8  # otherwise the test shows nothing
    populator = Prefaulter()
    populator.add(own)
    wait_for(own)
    assert not own.pool.any()
    own.pool[1, 7] = 3.0
    peer = SharedRegion.attach(os.getpid(), own.fd, 1, LAYOUT)
    assert resident(peer) < LAYOUT.nbytes / 8
    populator.add(peer)
    wait_for(peer)
    assert (peer.pool[1, 7] == 3.0).all()
    assert int(peer.pool.count_nonzero()) == peer.pool[1, 7].numel()
    populator.close()
    populator.close()


def test_closing_does_not_wait_for_the_remaining_pieces(monkeypatch: pytest.MonkeyPatch):
    pieces = []

    def slow(*piece: int) -> int:
        pieces.append(piece)
        time.sleep(0.01)
        return 0

    monkeypatch.setattr(populate, "_madvise", slow)
    populator = Prefaulter()
    regions = [SharedRegion.create(LAYOUT, epoch=1) for _ in range(100)]
    for region in regions:
        populator.add(region)
    populator.close()
    assert len(pieces) < 100  # of 900


def test_a_region_is_not_kept_beyond_a_piece(monkeypatch: pytest.MonkeyPatch):
    began, go_on, pieces = threading.Event(), threading.Event(), []

    def gated(*piece: int) -> int:
        pieces.append(piece)
        began.set()
        assert go_on.wait(20)
        return 0

    monkeypatch.setattr(populate, "_madvise", gated)
    populator = Prefaulter()
    regions = [SharedRegion.create(LAYOUT, epoch=1) for _ in range(2)]
    for region in regions:
        populator.add(region)
    del region
    assert began.wait(20)
    first, second = map(weakref.ref, regions)
    regions.clear()
    assert first() is not None  # the kernel is writing to its mapping
    assert second() is None
    go_on.set()
    populator._queue.put(None)
    populator._thread.join(20)
    assert first() is None
    assert len(pieces) == 1


def test_a_kernel_without_support_is_asked_once_per_region(monkeypatch: pytest.MonkeyPatch):
    calls = []
    monkeypatch.setattr(populate, "_madvise", lambda *piece: calls.append(piece) or -1)
    populator = Prefaulter()
    regions = [SharedRegion.create(LAYOUT, epoch=1) for _ in range(3)]
    for region in regions:
        populator.add(region)
    populator._queue.put(None)
    populator._thread.join(20)
    assert len(calls) == len(regions)  # no second call for the same region
    regions[0].pool[0, 0] = 1.0
