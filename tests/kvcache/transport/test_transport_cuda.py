"""Claims about `cuda_ipc` that need a GPU and several processes: what lands, and what death leaves.

Processes take seconds to start on a GPU, so tests share those that they do not kill.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from cuda_devices import NEEDS_CUDA, cuda_ipc_transport, settle
from cuda_peer import SIZE, CudaCommands, big_layout
from kv_helpers import Clock, assert_content, make_cache, send, small_layout
from shm_peer import PAGES, Peer

from kvcache.cache import KVCache
from kvcache.errors import LeaseExpired, PeerUnreachable, StaleEpoch
from kvcache.lease import LANDED, KVAddress
from kvcache.memory import DeviceRegion
from kvcache.memory.device_region import PID
from kvcache.types import SeqId

pytestmark = [*NEEDS_CUDA, pytest.mark.processes, pytest.mark.slow]

PROMPT = list(range(100, 122))
ONE = SeqId(1)
BIG_PAGES, FLOODED = 4096, 2048  # of 512 KiB; pages of a lease that is flooded
KILLS = 8
CANARY = 7.0


def peer(name: str, epoch: int = 1) -> Peer:
    return Peer(name, epoch, CudaCommands)


@pytest.fixture(scope="module")
def here() -> Iterator[KVCache]:
    cache = make_cache(cuda_ipc_transport(1), small_layout(PAGES), name="here", clock=Clock())
    yield cache
    cache.check_integrity()
    cache.close()


@pytest.fixture(scope="module")
def two() -> Iterator[tuple[Peer, Peer]]:
    """Two processes that no test kills."""
    with ThreadPoolExecutor(2) as threads:
        both = tuple(threads.map(peer, ("one", "two")))
    yield both[0], both[1]
    for process in both:
        process.kill()


@pytest.fixture
def peers() -> Iterator[Callable[..., list[Peer]]]:
    """Return a function that starts processes at the same time; at the end they are killed."""
    started: list[Peer] = []

    def start(count: int, epoch: int = 1) -> list[Peer]:
        with ThreadPoolExecutor(count) as threads:
            new = list(threads.map(lambda number: peer(f"p{number}", epoch), range(count)))
        started.extend(new)
        return new

    yield start
    for process in started:
        with suppress(OSError):
            process.kill()


@pytest.fixture
def big() -> Iterator[KVCache]:
    """A receiver in this process with 2 GiB."""
    cache = make_cache(cuda_ipc_transport(5), big_layout(BIG_PAGES), name="big", epoch=5)
    yield cache
    cache.check_integrity()
    cache.close()
    del cache
    gc.collect()


def words(cache: KVCache) -> DeviceRegion:
    region = cache.transport.region
    assert isinstance(region, DeviceRegion)
    return region


def sweep_until_free(cache: KVCache) -> None:
    """Sweep without a pause, so that pages are used again as soon as that is allowed."""
    give_up = time.monotonic() + 20
    while cache.page_use().quarantined:
        assert time.monotonic() < give_up, "the quarantine does not end"
        cache.sweep()


# What lands


def test_puts_between_two_processes_land_exactly(here: KVCache, two: tuple[Peer, Peer]):
    one, other = two
    lease, address = here.prep_recv("r", PROMPT, 21, 0, 60.0)
    one.call("send", address, PROMPT, 0, 21)
    here.start_lease(lease.lease_id, ONE, PROMPT, 21)
    assert_content(here, ONE, PROMPT[:21])
    here.remove_sequence(ONE)
    lease_id, address = other.call("prep_recv", PROMPT, 21)
    send(here, address, PROMPT, 0, 21, chunk=5)
    assert other.call("start_and_compare", lease_id, PROMPT) == 21
    lease_id, address = other.call("prep_recv", PROMPT, 21)
    one.call("send", address, PROMPT, 0, 21)
    assert other.call("start_and_compare", lease_id, PROMPT) == 21


def test_layers_land_while_the_next_one_is_computed(here: KVCache, two: tuple[Peer, Peer]):
    """Neither the sender's calls nor its copies wait for the kernels of later layers."""
    lease, address = here.prep_recv("r", PROMPT, 20, 0, 60.0)
    region, pages = words(here), lease.own
    two[0].tell("send_slow_layers", address, PROMPT, 20)
    seen: list[tuple[bool, ...]] = []
    landed = []
    give_up = time.monotonic() + 20
    while not seen or not all(seen[-1]):
        assert time.monotonic() < give_up
        landed.append(int(region.slots[lease.slot, LANDED]))  # before the pages
        pool = here.store.pool[:, pages[:5]]
        now = tuple(bool((pool[layer] == layer + 1.0).all()) for layer in range(2))
        if not seen or seen[-1] != now:
            seen.append(now)
    assert seen == [(False, False), (True, False), (True, True)]
    assert set(landed[:-1]) <= {0}  # up to the look before the last layer was there
    assert two[0].answer() < 0.25  # the device takes 0.6 s
    assert here.lease(lease.lease_id).landed == 20
    here.release(lease.lease_id)


def test_a_put_after_the_end_of_the_lease_writes_nothing(here: KVCache, two: tuple[Peer, Peer]):
    lease, address = here.prep_recv("r", PROMPT, 21, 0, 60.0)
    two[0].call("open", address, PROMPT, 21)
    here.release(lease.lease_id)
    here.store.pool[:, 1:] = CANARY
    settle(here.store.pool)
    with pytest.raises(LeaseExpired):
        two[0].call("write_late", 21)
    assert bool((here.store.pool[:, 1:] == CANARY).all())


def test_an_address_of_an_earlier_epoch_is_stale(here: KVCache, two: tuple[Peer, Peer]):
    lease_id, address = two[1].call("prep_recv", PROMPT, 21)
    of_another = replace(KVAddress.verify(address, b"secret"), epoch=77).sign(b"secret")
    with pytest.raises(StaleEpoch):
        here.open_put(of_another, PROMPT, 0, 21)
    two[1].call("release", lease_id)


def test_a_gpu_that_is_not_visible_is_unreachable(here: KVCache, two: tuple[Peer, Peer]):
    lease_id, address = two[1].call("prep_recv", PROMPT, 21)
    verified = KVAddress.verify(address, b"secret")
    fields = verified.endpoint.split(":")
    fields[3] = "0" * 32
    elsewhere = replace(verified, endpoint=":".join(fields)).sign(b"secret")
    with pytest.raises(PeerUnreachable, match="CUDA_VISIBLE_DEVICES"):
        here.open_put(elsewhere, PROMPT, 0, 21)
    two[1].call("release", lease_id)


# What death leaves


def test_a_restarted_receiver_is_stale_or_unreachable(
    here: KVCache, peers: Callable[..., list[Peer]]
):
    (first,) = peers(1)
    _, address = first.call("prep_recv", PROMPT, 21)
    send(here, address, PROMPT, 0, 21)
    first.kill()
    (second,) = peers(1, epoch=2)
    with pytest.raises((StaleEpoch, PeerUnreachable)):
        here.open_put(address, PROMPT, 0, 21)
    lease_id, address = second.call("prep_recv", PROMPT, 21)
    send(here, address, PROMPT, 0, 21)
    assert second.call("start_and_compare", lease_id, PROMPT) == 21


def test_a_stopped_sender_keeps_the_pages_until_it_is_dead(
    here: KVCache, peers: Callable[..., list[Peer]]
):
    (sender,) = peers(1)
    lease, address = here.prep_recv("r", PROMPT, 21, 0, 60.0)
    sender.tell("send_and_stop_within", address, PROMPT, 21)
    sender.wait_until_stopped()
    assert int(words(here).writers[lease.slot, PID]) == sender.pid
    here.release(lease.lease_id)
    for _ in range(10):
        here.sweep()
    assert here.page_use().quarantined == 6
    os.kill(sender.pid, signal.SIGKILL)
    sweep_until_free(here)
    here.check_integrity()


def test_nothing_is_written_once_a_killed_senders_right_is_free(
    big: KVCache, peers: Callable[..., list[Peer]]
):
    """The senders copy 1 GiB at a time, and are killed in the middle."""
    tokens, in_copy = FLOODED * SIZE, 0
    prompt = list(range(tokens + 1))
    senders = peers(KILLS)
    region, pool = words(big), big.store.pool
    for sender in senders:
        sender.call("become_big", 64)
        lease, address = big.prep_recv("r", prompt, tokens, 0, 60.0)
        pages = torch.tensor(lease.own, device=pool.device)
        sender.tell("flood", address, tokens, -1.0)
        row = region.writers[lease.slot]

        def written(sender: Peer = sender, last: torch.Tensor = pages[-1:]) -> bool:
            assert not sender.has_answered(), sender.answer()
            return bool((pool[:, last] == -1.0).all())

        def writes(row: npt.NDArray[np.uint64] = row, pid: int = sender.pid) -> bool:
            return int(row[PID]) == pid

        wait_until(written)
        time.sleep(random.uniform(0.0, 0.003))
        wait_until(writes)
        os.kill(sender.pid, signal.SIGKILL)
        big.release(lease.lease_id)
        in_copy += bool(big.page_use().quarantined)
        sweep_until_free(big)
        pool[:, pages] = CANARY
        settle(pool)
        time.sleep(0.05)
        changed = int((pool[:, pages] != CANARY).sum())
        assert not changed, f"{changed} values were written after the right was free"
    assert in_copy, "no sender was killed while it held the right"


def test_a_receiver_killed_during_puts_does_not_harm_the_sender(
    peers: Callable[..., list[Peer]],
):
    sender, receiver = peers(2)
    sender.call("become_big", 64)
    receiver.call("become_big", BIG_PAGES)
    tokens = FLOODED * SIZE
    sender.tell("flood", receiver.call("prep_recv_big", tokens), tokens, -1.0)
    time.sleep(0.5)
    assert not sender.has_answered(), sender.answer()
    os.kill(receiver.pid, signal.SIGKILL)
    assert sender.answer() == PeerUnreachable.type
    assert sender.call("works") == 1000.0


def test_the_memory_of_a_dead_receiver_is_released(
    two: tuple[Peer, Peer], peers: Callable[..., list[Peer]]
):
    (receiver,) = peers(1)
    receiver.call("become_big", BIG_PAGES)
    address = receiver.call("prep_recv_big", 16)
    transport = cuda_ipc_transport(8)
    transport.register(transport.allocate(big_layout(4)))
    put = transport.open(KVAddress.verify(address, b"secret"), 0)
    before = free()
    receiver.kill()
    del put
    lease_id, address = two[1].call("prep_recv", PROMPT, 21)
    transport.open(KVAddress.verify(address, b"secret"), 0)  # which drops what is dead
    gc.collect()
    wait_until(lambda: free() > before + (1 << 30))
    two[1].call("release", lease_id)
    transport.close()


def free() -> int:
    return torch.cuda.mem_get_info()[0]


def wait_until(true: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 10
    while not true():
        assert time.monotonic() < give_up
