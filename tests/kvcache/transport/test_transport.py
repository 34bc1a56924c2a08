"""One suite for all transports, and tests that need several processes.

`device` is `cuda_ipc` over a fake of CUDA's calls, and `cuda_ipc` is the same on a GPU, if there is
one. `test_transport_nixl.py` runs the suite over NIXL.

The tests send real signals: a stopped process keeps its lock on the pool, a killed one does not.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_devices import CUDA_IPC, cuda_ipc_transport
from fake_device import UUID, FakeDevice, fake_device_transport
from kv_helpers import (
    LAYERS,
    Clock,
    assert_content,
    compute,
    kv_of,
    make_cache,
    pages_of,
    send,
    sequence,
    small_layout,
)
from shm_peer import PAGES, Peer

from kvcache.attention.plan import Plan
from kvcache.cache import KVCache
from kvcache.errors import (
    BadRange,
    BadRequest,
    Internal,
    KVIncomplete,
    LeaseExpired,
    MicroserveError,
    PeerUnreachable,
    StaleEpoch,
    Timeout,
)
from kvcache.lease.address import KVAddress
from kvcache.lease.control_slots import CLAIM, LANDED
from kvcache.lease.table import ReceiveLease
from kvcache.transport import (
    MemoryNetwork,
    MemoryTransport,
    Put,
    ShmTransport,
    Transport,
    make_transport,
)
from kvcache.transport.cuda_ipc import CudaIpcTarget
from kvcache.transport.target import HostTarget
from kvcache.types import PageId, SeqId

NewCache = Callable[..., KVCache]
PROMPT = list(range(100, 122))
ONE = SeqId(1)


@pytest.fixture(params=["memory", "shm", "device", CUDA_IPC])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def new(kind: str) -> Iterator[NewCache]:
    """Return a function that makes caches of one transport; at the end their pages are checked."""
    network, made, clock = MemoryNetwork(), [], Clock()

    def make(name: str, epoch: int = 1, pages: int = PAGES) -> KVCache:
        layout = small_layout(pages)
        transport: Transport
        match kind:
            case "memory":
                transport = MemoryTransport(network, epoch)
            case "shm":
                transport = ShmTransport(epoch)
            case "cuda_ipc":
                transport = cuda_ipc_transport(epoch)
            case _:
                transport = fake_device_transport(epoch)
        made.append(make_cache(transport, layout, name=name, epoch=epoch, clock=clock))
        return made[-1]

    yield make
    for cache in made:
        cache.check_integrity()
        cache.close()


@pytest.fixture(autouse=True)
def nothing_stays_in_dev_shm() -> Iterator[None]:
    before = _named_memory()
    yield
    assert _named_memory() <= before


def _named_memory() -> set[str]:
    """Return all names but those of semaphores, UCX and CUDA, which others create."""
    names = {path.name for path in Path("/dev/shm").iterdir()}
    return {name for name in names if not name.startswith(("sem.", "ucx_", "cuda."))}


def test_a_put_lands(new: NewCache):
    sender, receiver = new("s"), new("r", pages=40)  # pools may differ in size
    lease, address = receiver.prep_recv("r", PROMPT, 21, 0, 10.0)
    send(sender, address, PROMPT, 0, 21, chunk=5)
    assert receiver.start_lease(lease.lease_id, ONE, PROMPT, 21) == 21
    assert_content(receiver, ONE, PROMPT[:21])


def test_two_puts_at_a_time_do_not_mix(new: NewCache):
    sender, receiver = new("s"), new("r")
    prompts = [[base + i for i in range(20)] for base in (100, 200)]
    leases = [receiver.prep_recv("r", prompt, 20, 0, 10.0) for prompt in prompts]
    puts = [
        sender.open_put(address, prompt, 0, 20)
        for (_, address), prompt in zip(leases, prompts, strict=True)
    ]
    for number, (put, prompt) in enumerate(zip(puts, prompts, strict=True)):
        sender.mark_send(sequence(sender, number, prompt), put, 0, 20)
    for put in puts:
        put.close().result(10)
    for number, ((lease, _), prompt) in enumerate(zip(leases, prompts, strict=True)):
        receiver.start_lease(lease.lease_id, SeqId(number), [*prompt, 1], None)
        assert_content(receiver, SeqId(number), prompt)
        sender.clear_mark(SeqId(number))


def test_an_engine_may_send_to_itself(new: NewCache):
    cache = new("s")
    lease, address = cache.prep_recv("r", PROMPT, 20, 0, 10.0)
    send(cache, address, PROMPT, 0, 20)
    cache.start_lease(lease.lease_id, ONE, PROMPT, None)
    assert_content(cache, ONE, PROMPT[:20])


def test_a_claim_stands_in_the_receivers_memory(new: NewCache):
    sender, receiver = new("s"), new("r")
    lease, address = receiver.prep_recv("r", PROMPT, 20, 0, 10.0)
    words = receiver.transport.region.slots[lease.slot]
    assert int(words[CLAIM]) == 0
    sender.open_put(address, PROMPT, 0, 20)
    first = int(words[CLAIM])
    sender.open_put(address, PROMPT, 0, 20)
    assert 0 != int(words[CLAIM]) != first != 0


def test_the_watermark_rises_with_each_chunk(new: NewCache):
    sender, receiver = new("s"), new("r")
    lease, address = receiver.prep_recv("r", PROMPT, 20, 0, 10.0)
    put = sender.open_put(address, PROMPT, 0, 20)
    sender.add_sequence(ONE)
    sender.mark_send(ONE, put, 0, 20)
    for at in range(0, 20, 5):
        compute(sender, ONE, PROMPT[at : at + 5])
        put.close().result(10)
        assert int(receiver.transport.region.slots[lease.slot, LANDED]) == at + 5
    sender.clear_mark(ONE)


def test_a_dead_engine_is_unreachable(new: NewCache, kind: str):
    sender, receiver = new("s"), new("r")
    _, address = receiver.prep_recv("r", PROMPT, 20, 0, 10.0)
    if isinstance(receiver.transport, MemoryTransport):
        receiver.transport._network.members.clear()
    else:
        scheme = "shm" if kind == "shm" else "cuda_ipc"
        nowhere = f"{scheme}:{os.getpid()}:999" + f":{UUID}:00" * (scheme == "cuda_ipc")
        address = _with_endpoint(receiver, nowhere, PROMPT)
    with pytest.raises(PeerUnreachable):
        sender.open_put(address, PROMPT, 0, 20)


def _with_endpoint(receiver: KVCache, endpoint: str, prompt: list[int]) -> str:
    """Return a correctly signed address of an engine at `endpoint`."""
    lease, address = receiver.prep_recv("r", prompt, 20, 0, 10.0)
    receiver.release(lease.lease_id)
    return replace(KVAddress.verify(address, b"secret"), endpoint=endpoint).sign(b"secret")


@pytest.mark.parametrize("endpoint", ["memory:0", "shm:x:1", "shm:1", "", "shm:-1:3"])
@pytest.mark.parametrize("kind", ["shm", "device"])
def test_an_endpoint_of_another_kind_is_unreachable(new: NewCache, endpoint: str):
    sender, receiver = new("s"), new("r")
    with pytest.raises(PeerUnreachable):
        sender.open_put(_with_endpoint(receiver, endpoint, PROMPT), PROMPT, 0, 20)


def test_a_restarted_engine_is_stale(new: NewCache):
    sender, receiver = new("s"), new("r", epoch=1)
    _, address = receiver.prep_recv("r", PROMPT, 20, 0, 10.0)
    region = receiver.transport.region
    if isinstance(receiver.transport, MemoryTransport):
        receiver.transport.epoch = 2
    else:  # another engine's memory under the same number, as after a restart
        again = new("r", epoch=2)
        os.dup2(again.transport.region.fd, region.fd)  # type: ignore[attr-defined]
    with pytest.raises(StaleEpoch):
        sender.open_put(address, PROMPT, 0, 20)


def test_a_held_right_times_out(new: NewCache, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvcache.transport.put.RIGHT_TIMEOUT_S", 0.01)
    sender, receiver = new("s"), new("r")
    lease, address = receiver.prep_recv("r", PROMPT, 20, 0, 10.0)
    assert receiver.transport.region.try_acquire_right(lease.slot)
    with pytest.raises(Timeout):
        sender.open_put(address, PROMPT, 0, 20)
    receiver.transport.region.release_right(lease.slot)


def test_a_start_meets_a_writer(new: NewCache):
    """The lease and the put continue normally."""
    sender, receiver = new("s"), new("r")
    lease, address = receiver.prep_recv("r", PROMPT, 20, 0, 10.0)
    put = sender.open_put(address, PROMPT, 0, 20)
    region = receiver.transport.region
    assert region.try_acquire_right(lease.slot)
    for call in (
        lambda: receiver.start_lease(lease.lease_id, ONE, PROMPT, 0),
        lambda: receiver.start_lease(lease.lease_id, ONE, PROMPT, None),
    ):
        with pytest.raises(KVIncomplete):
            call()
    region.release_right(lease.slot)
    sender.mark_send(sequence(sender, 1, PROMPT[:20]), put, 0, 20)
    put.close().result(10)
    sender.clear_mark(ONE)
    assert receiver.start_lease(lease.lease_id, ONE, PROMPT, None) == 20


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["shm"])
@pytest.mark.slow
def test_memory_of_dead_peers_is_unmapped(new: NewCache, peers: Callable[..., Peer]):
    sender, dead, alive = new("s"), peers("dead"), peers("alive")
    before = _memories()
    _, address = dead.call("prep_recv", PROMPT, 20)
    send(sender, address, PROMPT, 0, 20)
    dead.kill()
    _, address = alive.call("prep_recv", PROMPT, 20)
    send(sender, address, PROMPT, 0, 20)  # the dead peer's worker unmaps before this put ends
    assert _memories() == before + 1


def _memories() -> int:
    """Return how many caches' memory this process maps."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text().splitlines()
    return len({line.split()[4] for line in maps if "microserve-kv" in line})


class Later:
    """A plan whose kernels run asynchronously, as on a GPU; each waits for one of `gates`."""

    def __init__(self, plan: Plan, device: FakeDevice, gates: Iterator[threading.Event]) -> None:
        self._plan, self._device, self._gates = plan, device, gates

    def append(self, pages: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        gate = next(self._gates)

        def kernel() -> None:
            assert gate.wait(10)
            self._plan.append(pages, k, v)

        self._device.start(kernel)

    def attend(self, pages: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        return q


def device_of(cache: KVCache) -> FakeDevice:
    device: FakeDevice = cache.transport._device  # type: ignore[attr-defined]
    return device


@pytest.mark.parametrize("kind", ["device"])
def test_a_devices_kv_is_put_layer_by_layer_once_computed(new: NewCache):
    """Neither the step nor the put's worker waits for the simulated device.

    Each layer lands while the next is computed, and the watermark rises after the last.
    """
    sender, receiver = new("s"), new("r")
    gates = [threading.Event() for _ in range(LAYERS)]
    each, planner = iter(gates), sender.store.planner
    device = device_of(sender)
    sender.store.planner = lambda spans: Later(planner(spans), device, each)
    lease, address = receiver.prep_recv("r", PROMPT, 21, 0, 10.0)
    other, elsewhere = receiver.prep_recv("o", PROMPT, 8, 0, 10.0)
    put, seq_id = sender.open_put(address, PROMPT, 0, 21), SeqId(5)
    sender.add_sequence(seq_id, PROMPT[:21])
    sender.mark_send(seq_id, put, 0, 21)
    compute(sender, seq_id, PROMPT[:21])
    done = put.close()

    def there() -> list[bool]:
        kv = receiver.store.pool[:, lease.own].transpose(2, 3).flatten(1, 2)[:, :21]
        return [torch.equal(kv[layer], kv_of(PROMPT[:21], layer)) for layer in range(LAYERS)]

    def landed() -> int:
        return int(receiver.transport.region.slots[lease.slot, LANDED])

    # Meanwhile, another put of the same worker continues.
    claimed = sender.open_put(elsewhere, PROMPT, 0, 8)
    claimed.close().result(10)
    for layer, gate in enumerate(gates):
        time.sleep(0.01)
        assert there() == [n < layer for n in range(LAYERS)] and not done.done()
        assert landed() == 0
        gate.set()
        while not there()[layer]:
            time.sleep(0.001)
    done.result(10)
    assert landed() == 21
    sender.clear_mark(seq_id)
    sender.remove_sequence(seq_id)
    receiver.release(lease.lease_id)
    receiver.release(other.lease_id)


@pytest.mark.parametrize("kind", ["device"])
def test_a_cancelled_put_ends_after_the_devices_work(new: NewCache):
    """Before that, the device may still write the pages, so they are not reused."""
    sender, receiver = new("s"), new("r")
    gate, planner = threading.Event(), sender.store.planner
    device = device_of(sender)
    sender.store.planner = lambda spans: Later(planner(spans), device, repeat(gate))
    lease, address = receiver.prep_recv("r", PROMPT, 21, 0, 10.0)
    put, seq_id = sender.open_put(address, PROMPT, 0, 21), SeqId(5)
    sender.add_sequence(seq_id, PROMPT[:21])
    sender.mark_send(seq_id, put, 0, 21)
    compute(sender, seq_id, PROMPT[:21])
    put.cancel()
    done = put.close()
    time.sleep(0.01)
    assert not done.done()
    gate.set()
    done.result(10)
    assert receiver.transport.region.slots[lease.slot, LANDED] == 0 and put.bytes_sent == 0
    sender.clear_mark(seq_id)
    sender.remove_sequence(seq_id)
    receiver.release(lease.lease_id)


def test_a_transport_is_found_by_the_name_in_its_endpoint():
    transport = make_transport("shm", 1, secret=b"")
    transport.register(transport.allocate(small_layout(3)))
    assert transport.endpoint.startswith("shm:")
    transport.close()
    with pytest.raises(BadRequest, match="carrier pigeon"):
        make_transport("carrier pigeon", 1, secret=b"")


@pytest.mark.parametrize(
    ("name", "device"), [("shm", "cuda"), ("nixl", "cuda:1"), ("cuda_ipc", "cpu")]
)
def test_a_transport_that_does_not_reach_a_device_is_refused(name: str, device: str):
    with pytest.raises(BadRequest, match="cuda_ipc"):
        make_transport(name, 1, secret=b"", device=torch.device(device))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", ["auto", "cuda_ipc"])
def test_a_gpu_that_is_not_there_is_refused(name: str):
    with pytest.raises(BadRequest, match=r"extra cuda|no GPU"):
        make_transport(name, 1, secret=b"", device=torch.device("cuda"))


@pytest.mark.parametrize("kind", ["device"])
@pytest.mark.parametrize(
    "endpoint",
    ["cuda_ipc", "cuda_ipc:1:2:3", "cuda_ipc:x:1:2:00", "cuda_ipc:1:x:2:00", "cuda_ipc:1:2:3:0x"],
)
def test_a_malformed_endpoint_of_a_gpu_is_unreachable(new: NewCache, endpoint: str):
    sender, receiver = new("s"), new("r")
    with pytest.raises(PeerUnreachable, match="cuda_ipc"):
        sender.open_put(_with_endpoint(receiver, endpoint, PROMPT), PROMPT, 0, 20)


@pytest.mark.parametrize("kind", ["device"])
def test_a_pool_on_a_device_that_is_not_here_is_unreachable(new: NewCache):
    sender, receiver = new("s"), new("r")
    endpoint = receiver.transport.endpoint.replace(UUID, "0ther")
    with pytest.raises(PeerUnreachable, match="0ther"):
        sender.open_put(_with_endpoint(receiver, endpoint, PROMPT), PROMPT, 0, 20)


# Workers of one sender


def test_a_joined_worker_writes_beside_the_lead(new: NewCache):
    lead, other, receiver = new("s"), new("t"), new("r")
    lease, address = receiver.prep_recv("r", PROMPT, 20, 0, 10.0)
    first = lead.open_put(address, PROMPT, 0, 20)
    second = other.transport.open(KVAddress.verify(address, b"secret"), 0, join=first.claim)
    for cache in (lead, other):
        sequence(cache, 1, PROMPT[:20])
    first.write(range(1), pages_of(lead, ONE), 0, 20)
    second.write(range(1, 2), pages_of(other, ONE), 0, 20)
    second.close().result(10)
    first.signal(20)
    first.close().result(10)
    receiver.start_lease(lease.lease_id, ONE, PROMPT, None)
    assert_content(receiver, ONE, PROMPT[:20])


def test_a_foreign_claim_cannot_join(new: NewCache):
    lead, other, receiver = new("s"), new("t"), new("r")
    _, address = receiver.prep_recv("r", PROMPT, 20, 0, 10.0)
    claim = lead.open_put(address, PROMPT, 0, 20).claim
    for foreign in (claim ^ 2, 1):
        with pytest.raises(LeaseExpired):
            other.transport.open(KVAddress.verify(address, b"secret"), 0, join=foreign)
    with pytest.raises(BadRange):
        other.transport.open(KVAddress.verify(address, b"secret"), 4, join=claim)
    assert not receiver.store.pool.count_nonzero()


def test_only_the_lead_signals(new: NewCache):
    lead, other, receiver = new("s"), new("t"), new("r")
    _, address = receiver.prep_recv("r", PROMPT, 20, 0, 10.0)
    claim = lead.open_put(address, PROMPT, 0, 20).claim
    joined = other.transport.open(KVAddress.verify(address, b"secret"), 0, join=claim)
    assert joined.claim == claim
    with pytest.raises(Internal):
        joined.signal(20)


def test_a_new_sender_fences_all_workers_of_the_previous_one(new: NewCache):
    lead, other, receiver = new("s"), new("t"), new("r")
    lease, address = receiver.prep_recv("r", PROMPT, 20, 0, 10.0)
    first = lead.open_put(address, PROMPT, 0, 20)
    second = other.transport.open(KVAddress.verify(address, b"secret"), 0, join=first.claim)
    send(new("u"), address, PROMPT, 0, 20)
    for put, cache in ((first, lead), (second, other)):
        sequence(cache, 1, PROMPT[:20])
        put.write(range(2), pages_of(cache, ONE), 0, 20)
        with pytest.raises(LeaseExpired):
            put.close().result(10)
    receiver.start_lease(lease.lease_id, ONE, PROMPT, None)
    assert_content(receiver, ONE, PROMPT[:20])


# The write right is held rarely and briefly


@pytest.fixture
def deep(new: NewCache, monkeypatch: pytest.MonkeyPatch) -> NewCache:
    """Like `new`, with caches of 30 layers."""
    layout = replace(small_layout(PAGES), layers=30)
    monkeypatch.setattr(sys.modules[new.__module__], "small_layout", lambda pages: layout)
    return new


def test_a_token_of_many_layers_is_one_copy(deep: NewCache):
    """DéjàVu's buffered copies: one copy instead of one per layer and half (keys, values)."""
    sender, receiver = deep("s"), deep("r")
    _, address = receiver.prep_recv("r", PROMPT, 20, 0, 10.0)
    put = sender.open_put(address, PROMPT, 0, 20)
    sender.store.pool[:, 1:] = 1.0
    calls = watched(put)
    for position in range(3):
        put.write(range(30), [PageId(1)], position, position + 1)
        put.signal(position + 1)
        put.close().result(10)
    assert put.bytes_sent == 3 * 30 * sender.layout.token_bytes
    assert int(receiver.store.pool.count_nonzero()) == put.bytes_sent // 4
    assert calls.count("copy") == 3
    assert 3 <= calls.count("try_acquire_right") <= 6  # the watermark may need a hold of its own


def test_queued_writes_are_sent_together(deep: NewCache):
    """The layers are written one by one, as in a step, behind a slow put of the engine."""
    sender, receiver = deep("s"), deep("r")
    _, address = receiver.prep_recv("r", PROMPT, 20, 0, 10.0)
    put = sender.open_put(address, PROMPT, 0, 20)
    calls, gate = watched(put), threading.Event()
    put._worker.submit(lambda: gate.wait(10) and None)  # type: ignore[attr-defined]
    for layer in range(30):
        put.write(range(layer, layer + 1), [PageId(1)], 0, 4)
    put.signal(4)
    gate.set()
    put.close().result(10)
    assert calls.count("copy") == calls.count("try_acquire_right") == 1


def test_a_large_put_drops_the_right_repeatedly(deep: NewCache, monkeypatch: pytest.MonkeyPatch):
    sender, receiver = deep("s"), deep("r")
    token = sender.layout.token_bytes
    for target in (HostTarget, CudaIpcTarget):
        monkeypatch.setattr(target, "commit_bytes", 7 * 20 * token)
    _, address = receiver.prep_recv("r", PROMPT, 20, 0, 10.0)
    put = sender.open_put(address, PROMPT, 0, 20)
    calls = watched(put)
    put.write(range(30), [PageId(page) for page in range(1, 6)], 0, 20)
    put.close().result(10)
    assert calls == ["try_acquire_right", "copy", "release_right"] * 5  # 7, 7, 7, 7 and 2 layers
    assert put.bytes_sent == 30 * 20 * token


def watched(put: Put) -> list[str]:
    """Record the calls of the put's target from now on."""
    target, calls = put._target, []  # type: ignore[attr-defined]

    def watch(name: str) -> None:
        usual = getattr(target, name)

        def call(*args: object) -> object:
            calls.append(name)
            return usual(*args)

        setattr(target, name, call)

    for name in ("try_acquire_right", "copy", "release_right"):
        watch(name)
    return calls


# Two processes


@pytest.fixture
def peers() -> Iterator[Callable[..., Peer]]:
    """Return a function that starts peer processes; at the end they are killed."""
    started: list[Peer] = []

    def start(name: str, epoch: int = 1) -> Peer:
        started.append(Peer(name, epoch))
        return started[-1]

    yield start
    for peer in started:
        peer.kill()


@pytest.fixture
def here() -> Iterator[KVCache]:
    layout = small_layout(PAGES)
    cache = make_cache(ShmTransport(1), layout, name="here")
    yield cache
    cache.check_integrity()
    cache.close()


@pytest.mark.processes
def test_a_put_from_another_process_lands(here: KVCache, peers: Callable[..., Peer]):
    lease, address = here.prep_recv("r", PROMPT, 21, 0, 60.0)
    peers("s").call("send", address, PROMPT, 0, 21)
    here.start_lease(lease.lease_id, ONE, PROMPT, 21)
    assert_content(here, ONE, PROMPT[:21])


@pytest.mark.processes
def test_a_put_completes_while_the_receiver_is_stopped(here: KVCache, peers: Callable[..., Peer]):
    receiver = peers("r")
    lease_id, address = receiver.call("prep_recv", PROMPT, 21)
    receiver.signal(signal.SIGSTOP)
    send(here, address, PROMPT, 0, 21)
    receiver.signal(signal.SIGCONT)
    assert receiver.call("landed", lease_id) == 21
    assert receiver.call("start_and_compare", lease_id, PROMPT) == 21


@pytest.mark.processes
def test_a_killed_receiver_is_unreachable(here: KVCache, peers: Callable[..., Peer]):
    receiver = peers("r")
    _, address = receiver.call("prep_recv", PROMPT, 21)
    receiver.kill()
    with pytest.raises(PeerUnreachable):
        here.open_put(address, PROMPT, 0, 21)


@pytest.mark.processes
def test_a_receiver_killed_during_the_put_does_not_harm_the_sender(
    here: KVCache, peers: Callable[..., Peer]
):
    receiver = peers("r")
    _, address = receiver.call("prep_recv", PROMPT, 21)
    put = here.open_put(address, PROMPT, 0, 21)
    receiver.kill()
    here.mark_send(sequence(here, 1, PROMPT[:21]), put, 0, 21)
    put.close().result(10)  # the memory outlives its process
    with pytest.raises(PeerUnreachable):
        here.open_put(address, PROMPT, 0, 21)


@pytest.mark.processes
def test_a_restarted_receiver_is_stale_or_unreachable(here: KVCache, peers: Callable[..., Peer]):
    first = peers("r", 1)
    _, address = first.call("prep_recv", PROMPT, 21)
    send(here, address, PROMPT, 0, 21)
    first.kill()
    second = peers("r", 2)
    with pytest.raises((StaleEpoch, PeerUnreachable)):
        here.open_put(address, PROMPT, 0, 21)
    _, address = second.call("prep_recv", PROMPT, 21)
    send(here, address, PROMPT, 0, 21)


@pytest.fixture
def stopped(here: KVCache, peers: Callable[..., Peer]) -> tuple[Peer, ReceiveLease, str]:
    """A sender that is stopped while it holds the write right of one of `here`'s leases."""
    sender = peers("s")
    lease, address = here.prep_recv("r", PROMPT, 21, 0, 60.0)
    sender.tell("send_and_stop_within", address, PROMPT, 21)
    sender.wait_until_stopped()
    return sender, lease, address


@pytest.mark.processes
def test_a_stopped_sender_keeps_the_pages_from_others(
    here: KVCache, stopped: tuple[Peer, ReceiveLease, str]
):
    sender, lease, _ = stopped
    here.release(lease.lease_id)
    assert here.page_use().quarantined == 6
    here.sweep()
    here.check_integrity()
    assert here.page_use().quarantined == 6  # repeated calls change nothing
    with pytest.raises(LeaseExpired):
        here.lease(lease.lease_id)

    # All other pages get new owners; the late write changes none of them.
    other = sequence(here, 1, list(range(500, 500 + 26 * 4)))
    assert here.page_use().free == 0
    assert not set(pages_of(here, other)) & set(lease.own)
    sender.signal(signal.SIGCONT)
    assert sender.answer().startswith("lease_expired")
    assert_content(here, other, list(range(500, 500 + 26 * 4)))

    here.sweep()
    assert here.page_use().quarantined == 0
    compute(here, other, range(26 * 4, 32 * 4))  # the quarantined pages are usable again


@pytest.mark.processes
def test_killing_the_stopped_sender_frees_the_quarantine(
    here: KVCache, stopped: tuple[Peer, ReceiveLease, str]
):
    sender, lease, _ = stopped
    here.release(lease.lease_id)
    here.sweep()
    assert here.page_use().quarantined == 6
    sender.kill()
    here.sweep()
    assert here.page_use().free == here.page_use().total
    assert not here.store.pool.count_nonzero()


@pytest.mark.processes
def test_a_stopped_sender_blocks_a_start_but_no_longer_than_it_lives(
    here: KVCache, stopped: tuple[Peer, ReceiveLease, str]
):
    sender, lease, _ = stopped
    with pytest.raises(KVIncomplete):
        here.start_lease(lease.lease_id, ONE, PROMPT, None)
    sender.kill()
    assert here.start_lease(lease.lease_id, ONE, PROMPT, None) == 0


@pytest.mark.processes
def test_another_sender_continues_after_a_killed_one(
    here: KVCache, stopped: tuple[Peer, ReceiveLease, str], peers: Callable[..., Peer]
):
    sender, lease, address = stopped
    sender.kill()
    peers("t").call("send", address, PROMPT, 0, 21)
    assert here.start_lease(lease.lease_id, ONE, PROMPT, None) == 21
    assert_content(here, ONE, PROMPT[:21])


@pytest.mark.processes
def test_a_stopped_sender_times_another_one_out(
    here: KVCache,
    stopped: tuple[Peer, ReceiveLease, str],
    peers: Callable[..., Peer],
    monkeypatch: pytest.MonkeyPatch,
):
    _, lease, address = stopped
    layout = small_layout(PAGES)
    other = make_cache(ShmTransport(3), layout, name="other", epoch=3)
    monkeypatch.setattr("kvcache.transport.put.RIGHT_TIMEOUT_S", 0.05)
    began = time.monotonic()
    with pytest.raises(Timeout):
        other.open_put(address, PROMPT, 0, 21)
    assert time.monotonic() - began < 5
    assert here.lease(lease.lease_id).landed == 0
    other.transport.close()


@pytest.fixture
def another() -> Iterator[Callable[[str], KVCache]]:
    """Return a function that makes further engines in this process."""
    made: list[KVCache] = []

    def make(name: str) -> KVCache:
        layout = small_layout(PAGES)
        made.append(make_cache(ShmTransport(3), layout, name=name, epoch=3))
        return made[-1]

    yield make
    for cache in made:
        cache.check_integrity()
        cache.close()


@pytest.mark.processes
@pytest.mark.parametrize("waits", ["write", "claim"])
def test_a_stopped_holder_delays_only_its_slot(
    waits: str,
    here: KVCache,
    peers: Callable[..., Peer],
    another: Callable[[str], KVCache],
    monkeypatch: pytest.MonkeyPatch,
):
    """A put waits for a write right that a stopped process holds.

    The same engine's puts into another lease of the receiver, and to another receiver, do not wait.
    """
    monkeypatch.setattr("kvcache.transport.put.RIGHT_TIMEOUT_S", 30.0)
    sender, third, process = another("s"), another("t"), peers("p")
    pages = pages_of(sender, sequence(sender, 1, PROMPT[:21]))

    def write(put: Put) -> Future[None]:
        put.write(range(2), pages, 0, 21)
        put.signal(21)
        return put.close()

    contested, address = here.prep_recv("r", PROMPT, 21, 0, 60.0)
    claimed = sender.open_put(address, PROMPT, 0, 21) if waits == "write" else None
    process.tell("claim_and_stop_within", address, PROMPT, 21)
    process.wait_until_stopped()
    with ThreadPoolExecutor(1) as thread:
        late: Future[Any] = (
            write(claimed) if claimed else thread.submit(sender.open_put, address, PROMPT, 0, 21)
        )
        try:
            for receiver in (here, third):
                lease, address = receiver.prep_recv("r", PROMPT, 21, 0, 60.0)
                write(sender.open_put(address, PROMPT, 0, 21)).result(20)
                receiver.start_lease(lease.lease_id, ONE, PROMPT, None)
                assert_content(receiver, ONE, PROMPT[:21])
            assert not late.done()
        finally:
            process.kill()  # the waiting put gets the right
        put = late.result(20)
        if claimed is None:
            write(put).result(20)
    assert here.lease(contested.lease_id).landed == 21


@pytest.mark.processes
def test_errors_keep_their_type_between_processes(peers: Callable[..., Peer]):
    with pytest.raises(MicroserveError, match=r"malformed|secret"):
        peers("s").call("send", "nonsense", PROMPT, 0, 21)
