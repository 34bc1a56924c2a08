"""Both transports through one suite; then what only processes can show, with processes.

Signals are sent for real: a stopped process holds its lock on the pool, a killed one does not.
"""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from kv_helpers import (
    Clock,
    assert_content,
    compute,
    make_cache,
    pages_of,
    send,
    sequence,
    small_layout,
)
from shm_peer import PAGES, Peer

from kvcache.address import KVAddress
from kvcache.cache import KVCache
from kvcache.errors import (
    KVIncomplete,
    LeaseExpired,
    MicroserveError,
    PeerUnreachable,
    StaleEpoch,
    Timeout,
)
from kvcache.lease import ReceiveLease
from kvcache.region import CLAIM, LANDED
from kvcache.transport import MemoryNetwork, MemoryTransport, ShmTransport
from kvcache.types import SeqId

NewCache = Callable[..., KVCache]
PROMPT = list(range(100, 122))
ONE = SeqId(1)


@pytest.fixture(params=["memory", "shm"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def new(kind: str) -> Iterator[NewCache]:
    """Makes caches of one transport, each of which must account for its pages in the end."""
    network, made, clock = MemoryNetwork(), [], Clock()

    def make(name: str, epoch: int = 1, pages: int = PAGES) -> KVCache:
        layout = small_layout(pages)
        transport = (
            ShmTransport(layout, epoch)
            if kind == "shm"
            else MemoryTransport(network, layout, epoch)
        )
        made.append(make_cache(transport, layout, name=name, epoch=epoch, clock=clock))
        return made[-1]

    yield make
    for cache in made:
        cache.check_integrity()
        cache.transport.close()


@pytest.fixture(autouse=True)
def nothing_stays_in_dev_shm() -> Iterator[None]:
    before = set(Path("/dev/shm").iterdir())
    yield
    assert set(Path("/dev/shm").iterdir()) <= before


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


def test_an_engine_that_is_gone_is_unreachable(new: NewCache):
    sender, receiver = new("s"), new("r")
    _, address = receiver.prep_recv("r", PROMPT, 20, 0, 10.0)
    if isinstance(receiver.transport, MemoryTransport):
        receiver.transport._network.members.clear()
    else:
        address = _with_endpoint(receiver, f"shm:{os.getpid()}:999", PROMPT)
    with pytest.raises(PeerUnreachable):
        sender.open_put(address, PROMPT, 0, 20)


def _with_endpoint(receiver: KVCache, endpoint: str, prompt: list[int]) -> str:
    """An address, rightly signed, of an engine that is reached at `endpoint`."""
    lease, address = receiver.prep_recv("r", prompt, 20, 0, 10.0)
    receiver.release(lease.lease_id)
    return replace(KVAddress.verify(address, b"secret"), endpoint=endpoint).sign(b"secret")


@pytest.mark.parametrize("endpoint", ["memory:0", "shm:x:1", "shm:1", "", "shm:-1:3"])
@pytest.mark.parametrize("kind", ["shm"])
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
    assert receiver.transport.region.try_right(lease.slot)
    with pytest.raises(Timeout):
        sender.open_put(address, PROMPT, 0, 20)
    receiver.transport.region.drop_right(lease.slot)


def test_a_start_meets_a_writer(new: NewCache):
    """The lease, and the put, go on as if nothing had happened."""
    sender, receiver = new("s"), new("r")
    lease, address = receiver.prep_recv("r", PROMPT, 20, 0, 10.0)
    put = sender.open_put(address, PROMPT, 0, 20)
    region = receiver.transport.region
    assert region.try_right(lease.slot)
    for call in (
        lambda: receiver.start_lease(lease.lease_id, ONE, PROMPT, 0),
        lambda: receiver.start_lease(lease.lease_id, ONE, PROMPT, None),
    ):
        with pytest.raises(KVIncomplete):
            call()
    region.drop_right(lease.slot)
    sender.mark_send(sequence(sender, 1, PROMPT[:20]), put, 0, 20)
    put.close().result(10)
    sender.clear_mark(ONE)
    assert receiver.start_lease(lease.lease_id, ONE, PROMPT, None) == 20


@pytest.mark.parametrize("kind", ["shm"])
def test_memory_of_dead_peers_is_let_go(new: NewCache, peers: Callable[..., Peer]):
    sender, dead, alive = new("s"), peers("dead"), peers("alive")
    before = _memories()
    _, address = dead.call("prep_recv", PROMPT, 20)
    send(sender, address, PROMPT, 0, 20)
    dead.kill()
    _, address = alive.call("prep_recv", PROMPT, 20)
    send(sender, address, PROMPT, 0, 20)  # its worker has let go before this put is done
    assert _memories() == before + 1


def _memories() -> int:
    """How many caches' memory this process maps."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text().splitlines()
    return len({line.split()[4] for line in maps if "microserve-kv" in line})


# Two processes


@pytest.fixture
def peers() -> Iterator[Callable[..., Peer]]:
    """Starts processes, which are killed afterwards, whatever state they are in."""
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
    cache = make_cache(ShmTransport(layout, 1), layout, name="here")
    yield cache
    cache.check_integrity()
    cache.transport.close()


def test_a_put_from_another_process_lands(here: KVCache, peers: Callable[..., Peer]):
    lease, address = here.prep_recv("r", PROMPT, 21, 0, 60.0)
    peers("s").call("send", address, PROMPT, 0, 21)
    here.start_lease(lease.lease_id, ONE, PROMPT, 21)
    assert_content(here, ONE, PROMPT[:21])


def test_a_put_completes_while_the_receiver_is_stopped(here: KVCache, peers: Callable[..., Peer]):
    receiver = peers("r")
    lease_id, address = receiver.call("prep_recv", PROMPT, 21)
    receiver.signal(signal.SIGSTOP)
    send(here, address, PROMPT, 0, 21)
    receiver.signal(signal.SIGCONT)
    assert receiver.call("landed", lease_id) == 21
    assert receiver.call("start_and_compare", lease_id, PROMPT) == 21


def test_a_killed_receiver_is_unreachable(here: KVCache, peers: Callable[..., Peer]):
    receiver = peers("r")
    _, address = receiver.call("prep_recv", PROMPT, 21)
    receiver.kill()
    with pytest.raises(PeerUnreachable):
        here.open_put(address, PROMPT, 0, 21)


def test_a_receiver_killed_during_the_put_harms_nobody(here: KVCache, peers: Callable[..., Peer]):
    receiver = peers("r")
    _, address = receiver.call("prep_recv", PROMPT, 21)
    put = here.open_put(address, PROMPT, 0, 21)
    receiver.kill()
    here.mark_send(sequence(here, 1, PROMPT[:21]), put, 0, 21)
    put.close().result(10)  # into memory that nobody will read
    with pytest.raises(PeerUnreachable):
        here.open_put(address, PROMPT, 0, 21)


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
    """A sender that is stopped while it holds the write right of a lease of `here`."""
    sender = peers("s")
    lease, address = here.prep_recv("r", PROMPT, 21, 0, 60.0)
    sender.tell("send_and_stop_within", address, PROMPT, 21)
    sender.wait_until_stopped()
    return sender, lease, address


def test_a_stopped_sender_keeps_the_pages_from_others(
    here: KVCache, stopped: tuple[Peer, ReceiveLease, str]
):
    sender, lease, _ = stopped
    here.release(lease.lease_id)
    assert here.page_use().quarantined == 6
    here.sweep()
    here.check_integrity()
    assert here.page_use().quarantined == 6  # however often it is asked
    with pytest.raises(LeaseExpired):
        here.lease(lease.lease_id)

    # All other pages get new owners; the late write then changes none of them.
    other = sequence(here, 1, list(range(500, 500 + 26 * 4)))
    assert here.page_use().free == 0
    assert not set(pages_of(here, other)) & set(lease.own)
    sender.signal(signal.SIGCONT)
    assert sender.answer().startswith("lease_expired")
    assert_content(here, other, list(range(500, 500 + 26 * 4)))

    here.sweep()
    assert here.page_use().quarantined == 0
    compute(here, other, range(26 * 4, 32 * 4))  # and the pages are good again


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
    assert not here.pool.count_nonzero()


def test_a_stopped_sender_blocks_a_start_but_no_longer_than_it_lives(
    here: KVCache, stopped: tuple[Peer, ReceiveLease, str]
):
    sender, lease, _ = stopped
    with pytest.raises(KVIncomplete):
        here.start_lease(lease.lease_id, ONE, PROMPT, None)
    sender.kill()
    assert here.start_lease(lease.lease_id, ONE, PROMPT, None) == 0


def test_another_sender_goes_on_after_a_killed_one(
    here: KVCache, stopped: tuple[Peer, ReceiveLease, str], peers: Callable[..., Peer]
):
    sender, lease, address = stopped
    sender.kill()
    peers("t").call("send", address, PROMPT, 0, 21)
    assert here.start_lease(lease.lease_id, ONE, PROMPT, None) == 21
    assert_content(here, ONE, PROMPT[:21])


def test_a_stopped_sender_times_another_one_out(
    here: KVCache,
    stopped: tuple[Peer, ReceiveLease, str],
    peers: Callable[..., Peer],
    monkeypatch: pytest.MonkeyPatch,
):
    _, lease, address = stopped
    layout = small_layout(PAGES)
    other = make_cache(ShmTransport(layout, 3), layout, name="other", epoch=3)
    monkeypatch.setattr("kvcache.transport.put.RIGHT_TIMEOUT_S", 0.05)
    began = time.monotonic()
    with pytest.raises(Timeout):
        other.open_put(address, PROMPT, 0, 21)
    assert time.monotonic() - began < 5
    assert here.lease(lease.lease_id).landed == 0
    other.transport.close()


def test_errors_travel_between_processes_as_themselves(peers: Callable[..., Peer]):
    with pytest.raises(MicroserveError, match=r"malformed|secret"):
        peers("s").call("send", "nonsense", PROMPT, 0, 21)
