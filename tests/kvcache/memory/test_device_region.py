"""Regions with a pool on a device, over a fake one, and the names of writers in their rows."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection

import pytest
from fake_device import FakeDevice
from kv_helpers import small_layout

from kvcache.errors import BadRequest, StaleEpoch
from kvcache.lease import NONCE
from kvcache.memory import DeviceRegion, SharedRegion, SplitLayout
from kvcache.memory.device_region import PID, STARTED, DeviceSlots
from kvcache.memory.processes import Process, is_over, start_time, this_process
from kvcache.shard import split

LAYOUT = small_layout(3)
SLOT = 5


@pytest.fixture
def region() -> Iterator[DeviceRegion]:
    made = DeviceRegion.on(FakeDevice(), LAYOUT, 5)
    yield made
    made.close()


@pytest.fixture
def other(region: DeviceRegion) -> Iterator[DeviceSlots]:
    """The same words as another engine maps them."""
    slots = DeviceSlots.attach(os.getpid(), region.fd, 5, LAYOUT)
    yield slots
    slots.close()


@pytest.fixture
def process() -> Iterator[mp.Process]:
    """A process that does nothing."""
    started = mp.get_context("fork").Process(target=time.sleep, args=(60,), daemon=True)
    started.start()
    yield started
    started.kill()
    started.join()


def name_writer(region: DeviceRegion, pid: int, started: int) -> None:
    region.writers[SLOT, STARTED] = started
    region.writers[SLOT, PID] = pid


def test_the_pool_is_on_the_device_and_the_words_are_not(region: DeviceRegion):
    assert region.pool.shape == LAYOUT.shape
    assert not region.pool.count_nonzero() and not region.table.any()
    region.pool[:, 1] = 1.0
    assert region.memory.count_nonzero()
    assert os.fstat(region.fd).st_size == DeviceSlots.pool_at()


def test_regions_of_another_kind_are_stale(region: DeviceRegion):
    with pytest.raises(StaleEpoch):
        SharedRegion.attach(os.getpid(), region.fd, 5, LAYOUT)


def test_a_split_pool_is_refused():
    layout = SplitLayout(LAYOUT, tuple(split(LAYOUT.layers, LAYOUT.kv_heads, pp=1, tp=2)))
    with pytest.raises(BadRequest, match="split"):
        DeviceRegion.on(FakeDevice(), layout, 1)


def test_a_holder_is_named_while_it_holds(region: DeviceRegion):
    assert region.try_acquire_right(SLOT)
    assert tuple(region.writers[SLOT].tolist()) == this_process()
    region.release_right(SLOT)
    assert not region.writers[SLOT, PID]


@pytest.mark.parametrize("share", [0, 9])
def test_one_engine_holds_a_right_at_a_time(region: DeviceRegion, other: DeviceSlots, share: int):
    """Shared holders of another one have to wait too. Holders of this one share it."""
    assert region.try_acquire_right(SLOT, 9)
    assert not other.try_acquire_right(SLOT, share)
    assert other.try_acquire_right(SLOT + 1, share)
    assert region.try_acquire_right(SLOT, 9)
    region.release_right(SLOT)
    assert region.writers[SLOT, PID]
    region.release_right(SLOT)
    assert other.try_acquire_right(SLOT, share)


def test_a_name_that_a_living_process_left_keeps_the_right_from_others(
    region: DeviceRegion, process: mp.Process
):
    """As while the driver tears down what a killed process has on the device."""
    assert process.pid is not None
    name_writer(region, process.pid, start_time(process.pid))
    assert not region.try_acquire_right(SLOT)
    assert not region.try_acquire_right(SLOT, 9)
    assert int(region.writers[SLOT, PID]) == process.pid  # and still does
    process.kill()
    process.join()
    assert region.try_acquire_right(SLOT)
    assert tuple(region.writers[SLOT].tolist()) == this_process()
    region.release_right(SLOT)


def test_a_name_of_an_earlier_process_with_the_same_number_is_cleared(
    region: DeviceRegion, process: mp.Process
):
    assert process.pid is not None
    name_writer(region, process.pid, start_time(process.pid) - 1)
    assert region.try_acquire_right(SLOT)


def test_a_name_without_a_process_is_cleared(region: DeviceRegion):
    name_writer(region, 2**22 + 1, 1)  # above the highest possible number
    assert region.try_acquire_right(SLOT)


def hold(pipe: Connection, pid: int, fd: int) -> None:
    slots = DeviceSlots.attach(pid, fd, 5, LAYOUT)
    pipe.send(slots.try_acquire_right(SLOT))
    time.sleep(60)


def test_a_killed_holder_leaves_its_name_until_it_is_over(region: DeviceRegion):
    context = mp.get_context("fork")
    ours, theirs = context.Pipe()
    holder = context.Process(target=hold, args=(theirs, os.getpid(), region.fd), daemon=True)
    holder.start()
    assert ours.poll(20) and ours.recv()
    assert int(region.writers[SLOT, PID]) == holder.pid
    assert not region.try_acquire_right(SLOT)
    holder.kill()
    give_up = time.monotonic() + 20
    while not region.try_acquire_right(SLOT):  # it is a zombie, until the join below
        assert time.monotonic() < give_up
    holder.join()


def test_a_closed_region_ends_its_leases_and_is_kept_for_a_writer(process: mp.Process):
    for writer, kept in ((None, False), (os.getpid(), False), (process.pid, True)):
        region = DeviceRegion.on(FakeDevice(), LAYOUT, 5)
        slots = region.slots
        slots[SLOT, NONCE] = 3
        if writer is not None:
            name_writer(region, writer, 1)
        region.close()
        assert not slots[:, NONCE].any()
        assert region._allocation.kept is kept  # type: ignore[attr-defined]


def test_the_layout_may_be_any(region: DeviceRegion):
    odd = DeviceRegion.on(FakeDevice(), replace(LAYOUT, head_dim=3, pages=1), 5)
    assert odd.pool.shape == (2, 1, 2, 4, 2, 3)
    odd.close()


# Processes


@pytest.mark.parametrize("with_handles", [True, False])
def test_a_process_is_over_once_its_last_thread_has_ended(
    process: mp.Process, with_handles: bool, monkeypatch: pytest.MonkeyPatch
):
    if not with_handles:

        def not_there(pid: int) -> int:
            raise OSError(38, "Function not implemented")

        monkeypatch.setattr(os, "pidfd_open", not_there)
    pid = process.pid
    assert pid is not None
    started, watched = start_time(pid), Process(pid)
    assert started > 0 and not watched.is_over()
    assert not is_over(pid, started)
    assert is_over(pid, started + 1)
    os.kill(pid, signal.SIGSTOP)
    assert not is_over(pid, started)
    os.kill(pid, signal.SIGKILL)
    give_up = time.monotonic() + 20
    while not is_over(pid, started):  # while it is a zombie
        assert time.monotonic() < give_up
    assert watched.is_over()
    process.join()
    assert is_over(pid, started) and watched.is_over() and Process(pid).is_over()
    assert start_time(pid) == 0


def test_this_process_is_not_over():
    assert this_process() == (os.getpid(), start_time(os.getpid()))
    assert not is_over(*this_process())
