from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from kv_helpers import small_layout

from kvcache.errors import PeerUnreachable, StaleEpoch
from kvcache.lease.control_slots import LANDED, SLOTS
from kvcache.memory.region import LocalRegion, Region, SharedRegion

LAYOUT = small_layout(3)


@pytest.fixture
def shared() -> Iterator[SharedRegion]:
    region = SharedRegion.create(LAYOUT, epoch=5)
    yield region
    region.close()


@pytest.fixture(params=["local", "shared"])
def region(request: pytest.FixtureRequest) -> Iterator[Region]:
    region: Region = (
        LocalRegion(LAYOUT) if request.param == "local" else SharedRegion.create(LAYOUT, epoch=1)
    )
    yield region
    region.close()


def test_new_memory_is_zero(region: Region):
    assert region.pool.shape == LAYOUT.shape
    assert not region.pool.count_nonzero()
    assert not region.slots.any()


def test_a_right_is_held_once(region: Region):
    assert region.try_acquire_right(3)
    assert not region.try_acquire_right(3)
    region.release_right(3)
    assert region.try_acquire_right(3)
    region.release_right(3)


def test_a_peer_sees_what_is_written(shared: SharedRegion):
    peer = SharedRegion.attach(os.getpid(), shared.fd, 5, LAYOUT)
    peer.pool[1, 2] = 7.0
    peer.slots[9, LANDED] = 1 << 40
    assert torch.equal(shared.pool[1, 2], torch.full_like(shared.pool[1, 2], 7.0))
    assert not shared.pool[0].count_nonzero()
    assert int(shared.slots[9, LANDED]) == 1 << 40
    peer.close()


def test_rights_exclude_a_peer_slot_by_slot(shared: SharedRegion):
    peer = SharedRegion.attach(os.getpid(), shared.fd, 5, LAYOUT)
    assert peer.try_acquire_right(0)
    assert not shared.try_acquire_right(0)
    peer.release_right(0)
    assert shared.try_acquire_right(SLOTS - 1)
    assert peer.try_acquire_right(0)
    peer.release_right(0)
    shared.release_right(SLOTS - 1)
    peer.close()


def test_workers_of_one_sender_share_a_right(shared: SharedRegion):
    one, two = (SharedRegion.attach(os.getpid(), shared.fd, 5, LAYOUT) for _ in range(2))
    assert one.try_acquire_right(4, share=9)
    assert two.try_acquire_right(4, share=9)
    one.release_right(4)
    assert not shared.try_acquire_right(4)  # the owner waits for the last
    two.release_right(4)
    assert shared.try_acquire_right(4)
    assert not one.try_acquire_right(4, share=9)
    shared.release_right(4)


def test_unmapping_drops_the_rights(shared: SharedRegion):
    peer = SharedRegion.attach(os.getpid(), shared.fd, 5, LAYOUT)
    assert peer.try_acquire_right(1)
    peer.close()
    del peer  # Python's mmap has a duplicate of the descriptor
    assert shared.try_acquire_right(1)
    shared.release_right(1)


def test_a_right_in_closed_memory_is_an_error_not_a_wait(shared: SharedRegion):
    peer = SharedRegion.attach(os.getpid(), shared.fd, 5, LAYOUT)
    peer.close()
    for _ in range(2):
        with pytest.raises(OSError, match="descriptor"):
            peer.try_acquire_right(1)


def test_another_epoch_is_stale(shared: SharedRegion):
    with pytest.raises(StaleEpoch):
        SharedRegion.attach(os.getpid(), shared.fd, 6, LAYOUT)


def test_another_file_is_stale():
    other = os.memfd_create("other")
    with pytest.raises(StaleEpoch):
        SharedRegion.attach(os.getpid(), other, 5, LAYOUT)
    os.close(other)


def test_a_pipe_is_stale():
    """Another process with the peer's old process id may have a pipe at this descriptor."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    ends = os.pipe()
    with pytest.raises(StaleEpoch):
        SharedRegion.attach(os.getpid(), ends[0], 5, LAYOUT)
    for end in ends:
        os.close(end)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_missing_process_is_unreachable(shared: SharedRegion):
    with pytest.raises(PeerUnreachable):
        SharedRegion.attach(os.getpid(), 9999, 5, LAYOUT)
    with pytest.raises(PeerUnreachable):
        SharedRegion.attach(2**22 + 1, shared.fd, 5, LAYOUT)


def test_an_unreferenced_mapping_is_closed(shared: SharedRegion):
    before = len(list(Path("/proc/self/fd").iterdir()))
    peer = SharedRegion.attach(os.getpid(), shared.fd, 5, LAYOUT)
    assert len(list(Path("/proc/self/fd").iterdir())) == before + 2  # mmap has a duplicate
    del peer
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_refused_attach_leaks_no_descriptor(shared: SharedRegion):
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(StaleEpoch):
        SharedRegion.attach(os.getpid(), shared.fd, 6, LAYOUT)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_the_memory_is_private_and_in_no_file_system(shared: SharedRegion):
    assert stat.S_IMODE(os.fstat(shared.fd).st_mode) == 0o600
    assert str(Path(f"/proc/self/fd/{shared.fd}").readlink()).startswith("/memfd:")
    assert not os.get_inheritable(shared.fd)
