"""The suite of all transports over NIXL, and tests of the differences that a network makes.

Over TCP the receiver's process takes part in a put, and a dead sender's bytes may still arrive. The
tests check that neither loses a page or overwrites a byte.
"""

from __future__ import annotations

import errno
import gc
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import test_transport as suite
import torch
from kv_helpers import Clock, assert_content, make_cache, send, sequence, small_layout
from nixl_peer import NixlCommands
from shm_peer import PAGES, Peer
from test_transport import ONE, PROMPT

from kvcache.cache import KVCache
from kvcache.errors import BadRequest, LeaseExpired, PeerUnreachable, StaleEpoch, Timeout
from kvcache.lease.address import KVAddress
from kvcache.lease.table import ReceiveLease
from kvcache.memory.flagged_region import FlaggedRegion
from kvcache.memory.layout import KVLayout
from kvcache.transport import handshake, make_transport
from kvcache.transport.network import Network
from kvcache.transport.nixl import agent as nixl_agent
from kvcache.transport.nixl.transport import NixlTransport
from kvcache.types import SeqId

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not nixl_agent.has_nixl(),
        reason="NIXL is not installed: pip install -e '.[nixl]'",
    ),
]

HERE, THERE = "127.0.0.1", "127.0.0.2"
TCP: Mapping[str, str] = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}
SHARED: Mapping[str, str] = {"UCX_TLS": "tcp,cma,posix,sysv", "UCX_NET_DEVICES": "lo"}
WAIT_S = 20.0

# The suite of all transports, collected here and run with the fixtures of this module.
deep = suite.deep
nothing_stays_in_dev_shm = suite.nothing_stays_in_dev_shm
stopped = suite.stopped
test_a_claim_stands_in_the_receivers_memory = suite.test_a_claim_stands_in_the_receivers_memory
test_a_foreign_claim_cannot_join = suite.test_a_foreign_claim_cannot_join
test_a_held_right_times_out = suite.test_a_held_right_times_out
test_a_killed_receiver_is_unreachable = suite.test_a_killed_receiver_is_unreachable
test_a_large_put_drops_the_right_repeatedly = suite.test_a_large_put_drops_the_right_repeatedly
test_a_put_from_another_process_lands = suite.test_a_put_from_another_process_lands
test_a_put_lands = suite.test_a_put_lands
test_a_restarted_receiver_is_stale_or_unreachable = (
    suite.test_a_restarted_receiver_is_stale_or_unreachable
)
test_a_start_meets_a_writer = suite.test_a_start_meets_a_writer
test_a_stopped_sender_keeps_the_pages_from_others = (
    suite.test_a_stopped_sender_keeps_the_pages_from_others
)
test_a_token_of_many_layers_is_one_copy = suite.test_a_token_of_many_layers_is_one_copy
test_an_engine_may_send_to_itself = suite.test_an_engine_may_send_to_itself
test_another_sender_continues_after_a_killed_one = (
    suite.test_another_sender_continues_after_a_killed_one
)
test_a_stopped_holder_delays_only_its_slot = suite.test_a_stopped_holder_delays_only_its_slot
test_only_the_lead_signals = suite.test_only_the_lead_signals
test_the_watermark_rises_with_each_chunk = suite.test_the_watermark_rises_with_each_chunk
test_two_puts_at_a_time_do_not_mix = suite.test_two_puts_at_a_time_do_not_mix
test_queued_writes_are_sent_together = suite.test_queued_writes_are_sent_together
test_a_joined_worker_writes_beside_the_lead = suite.test_a_joined_worker_writes_beside_the_lead
test_a_new_sender_fences_all_workers_of_the_previous_one = (
    suite.test_a_new_sender_fences_all_workers_of_the_previous_one
)


# Here it matters who moves the bytes. The other tests run over TCP, and over shared memory in
# `make test-thorough`.
OVER_BOTH = {
    "test_a_killed_receiver_is_unreachable",
    "test_a_killed_sender_ends_its_quarantine",
    "test_a_large_put_drops_the_right_repeatedly",
    "test_a_put_from_another_process_lands",
    "test_a_put_lands",
    "test_a_receiver_killed_during_the_put_is_unreachable",
    "test_a_stopped_sender_keeps_the_pages_from_others",
    "test_another_sender_continues_after_a_killed_one",
    "test_only_leased_pages_are_written",
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    given = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    if "wire" in metafunc.fixturenames and "wire" not in given:
        both = metafunc.definition.originalname in OVER_BOTH
        shared = pytest.param("shared", marks=() if both else pytest.mark.thorough)
        metafunc.parametrize("wire", ["tcp", shared], indirect=True)


@pytest.fixture
def wire(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Mapping[str, str]:
    """The networks that UCX may use, by its environment variables, in this process too."""
    wire = TCP if request.param == "tcp" else SHARED
    for name, value in wire.items():
        monkeypatch.setenv(name, value)
    return wire


def nixl_cache(
    host: str, layout: KVLayout | None = None, *, name: str = "a", epoch: int = 1, port: int = 0
) -> KVCache:
    layout = layout or small_layout(PAGES)
    transport = NixlTransport(epoch, secret=b"wire", network=Network(host, range(port, port + 1)))
    return make_cache(transport, layout, name=name, epoch=epoch)


@pytest.fixture
def new(wire: Mapping[str, str]) -> Iterator[Callable[..., KVCache]]:
    """Like `new` in test_transport, with a separate address for each cache."""
    made: list[KVCache] = []
    clock = Clock()

    def make(name: str, epoch: int = 1, pages: int = PAGES, port: int = 0) -> KVCache:
        layout = small_layout(pages)
        transport = NixlTransport(
            epoch,
            secret=b"wire",
            network=Network(f"127.0.0.{len(made) + 1}", range(port, port + 1)),
        )
        made.append(make_cache(transport, layout, name=name, epoch=epoch, clock=clock))
        return made[-1]

    yield make
    for cache in made:
        cache.check_integrity()
        cache.close()
        assert not flags(cache).any()


def flags(cache: KVCache) -> torch.Tensor:
    region = cache.transport.region
    assert isinstance(region, FlaggedRegion)
    return torch.from_numpy(region.flags.astype("int64"))


@pytest.fixture
def peers(wire: Mapping[str, str]) -> Iterator[Callable[..., Peer]]:
    """Return a function that starts processes at the other address; at the end they are killed."""
    started: list[Peer] = []

    def start(name: str, epoch: int = 1, port: int = 0) -> Peer:
        started.append(Peer(name, epoch, partial(NixlCommands, THERE, dict(wire), port, "")))
        return started[-1]

    yield start
    for peer in started:
        peer.kill()


@pytest.fixture
def here(wire: Mapping[str, str]) -> Iterator[KVCache]:
    cache = nixl_cache(HERE, name="here")
    yield cache
    cache.check_integrity()
    cache.close()


@pytest.fixture
def another(wire: Mapping[str, str]) -> Iterator[Callable[[str], KVCache]]:
    """Return a function that makes further engines in this process."""
    made: list[KVCache] = []

    def make(name: str) -> KVCache:
        made.append(nixl_cache(f"127.0.0.{len(made) + 3}", name=name, epoch=3))
        return made[-1]

    yield make
    for cache in made:
        cache.check_integrity()
        cache.close()


def until(what: Callable[[], bool]) -> None:
    """Wait for a condition that other threads or processes will fulfil."""
    give_up = time.monotonic() + WAIT_S
    while not what():
        assert time.monotonic() < give_up
        time.sleep(0.002)


def swept(cache: KVCache) -> bool:
    """Return whether the quarantine has ended."""
    cache.sweep()
    return cache.page_use().quarantined == 0


# One process


def test_only_leased_pages_are_written(new: Callable[..., KVCache]):
    sender, receiver = new("s"), new("r")
    receiver.store.pool[:, 1:] = 7.5
    lease, address = receiver.prep_recv("r", PROMPT, 19, 0, 10.0)
    send(sender, address, PROMPT, 0, 19, chunk=3)
    others = sorted(set(range(1, PAGES + 1)) - set(lease.own))
    assert bool((receiver.store.pool[:, others] == 7.5).all())
    last = receiver.store.pool[:, lease.own[-1]]
    assert bool((last[:, :, 3:] == 7.5).all())  # the page's slots beyond the end are unchanged too
    receiver.start_lease(lease.lease_id, ONE, PROMPT, 19)
    assert_content(receiver, ONE, PROMPT[:19])


def test_an_ended_lease_is_refused_before_and_during_a_put(new: Callable[..., KVCache]):
    sender, receiver = new("s"), new("r")
    lease, address = receiver.prep_recv("r", PROMPT, 20, 0, 10.0)
    put = sender.open_put(address, PROMPT, 0, 20)
    receiver.release(lease.lease_id)
    assert receiver.page_use().leased == receiver.page_use().quarantined == 0
    receiver.store.pool[:, 1:] = 7.5
    sender.mark_send(sequence(sender, 1, PROMPT[:20]), put, 0, 20)
    with pytest.raises(LeaseExpired):
        put.close().result(WAIT_S)
    sender.clear_mark(ONE)
    with pytest.raises(LeaseExpired):
        sender.open_put(address, PROMPT, 0, 20)
    assert bool((receiver.store.pool[:, 1:] == 7.5).all())


def test_the_later_of_two_senders_continues(new: Callable[..., KVCache]):
    first, second, receiver = new("s"), new("t"), new("r")
    lease, address = receiver.prep_recv("r", PROMPT, 20, 0, 10.0)
    overtaken = first.open_put(address, PROMPT, 0, 20)
    send(second, address, PROMPT, 0, 20)
    overtaken.renew()
    with pytest.raises(LeaseExpired):
        overtaken.close().result(WAIT_S)
    receiver.start_lease(lease.lease_id, ONE, PROMPT, None)
    assert_content(receiver, ONE, PROMPT[:20])


def test_a_restart_on_the_same_port_is_stale(new: Callable[..., KVCache]):
    sender, receiver = new("s"), nixl_cache(THERE, name="r")
    _, old = receiver.prep_recv("r", PROMPT, 20, 0, 10.0)
    send(sender, old, PROMPT, 0, 20)  # the restart breaks this connection
    port = int(receiver.transport.endpoint.rpartition(":")[2])
    receiver.transport.close()
    with pytest.raises(PeerUnreachable):
        sender.transport.open(_address(old), 20)
    again = nixl_cache(THERE, name="r", epoch=2, port=port)
    with pytest.raises(StaleEpoch):
        sender.transport.open(_address(old), 20)
    _, address = again.prep_recv("r", PROMPT, 20, 0, 10.0)
    send(sender, address, PROMPT, 0, 20)
    again.transport.close()


def _address(text: str) -> KVAddress:
    return KVAddress.verify(text, b"secret")


def test_another_secret_is_refused(new: Callable[..., KVCache]):
    receiver, layout = new("r"), small_layout(PAGES)
    transport = NixlTransport(1, secret=b"another", network=Network(HERE))
    stranger = make_cache(transport, layout, name="s")
    _, address = receiver.prep_recv("r", PROMPT, 20, 0, 10.0)
    with pytest.raises(PeerUnreachable):
        stranger.open_put(address, PROMPT, 0, 20)
    transport.close()


@pytest.mark.parametrize("endpoint", ["memory:0", "nixl:", "nixl:127.0.0.1", "nixl:x:y", ""])
def test_an_endpoint_of_another_kind_is_unreachable(new: Callable[..., KVCache], endpoint: str):
    sender, receiver = new("s"), new("r")
    _, address = receiver.prep_recv("r", PROMPT, 20, 0, 10.0)
    with pytest.raises(PeerUnreachable):
        sender.transport.open(replace(_address(address), endpoint=endpoint), 0)


def test_a_silent_connection_is_closed(
    new: Callable[..., KVCache], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(handshake, "HANDSHAKE_TIMEOUT_S", 0.05)
    receiver = new("r")
    _, host, port = receiver.transport.endpoint.split(":")
    with socket.create_connection((host, int(port)), 10) as connection:
        assert connection.recv(1 << 16)  # the challenge
        assert connection.recv(1) == b""


def test_connections_are_accepted_again_after_descriptors_ran_out(
    new: Callable[..., KVCache], monkeypatch: pytest.MonkeyPatch
):
    accept, failures = socket.socket.accept, [OSError(errno.EMFILE, "too many open files")]

    def short_of_descriptors(listener: socket.socket) -> object:
        if failures:
            raise failures.pop()
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", short_of_descriptors)
    _, host, port = new("r").transport.endpoint.split(":")
    with socket.create_connection((host, int(port)), 10) as connection:
        assert connection.recv(1 << 16)  # the challenge
    assert not failures


def test_the_transport_is_found_by_its_endpoints_name():
    transport = make_transport("nixl", 1, secret=b"", network=Network(HERE))
    transport.register(transport.allocate(small_layout(3)))
    assert transport.endpoint.startswith(f"nixl:{HERE}:")
    transport.close()


def test_the_error_for_a_missing_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(nixl_agent, "PACKAGES", ("there_is_no_such_package",))
    with pytest.raises(BadRequest, match=r"pip install -e '\.\[nixl\]'"):
        NixlTransport(1, secret=b"", network=Network(HERE))


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::"])
def test_a_wildcard_address_is_refused(host: str):
    with pytest.raises(BadRequest, match="reach"):
        NixlTransport(1, secret=b"", network=Network(host))


def test_a_right_has_one_holder(new: Callable[..., KVCache]):
    region = new("r").transport.region
    assert isinstance(region, FlaggedRegion)
    region.flags[5, 3] = 1  # a sender's
    assert not region.try_acquire_right(5)
    region.flags[5, 3] = 0
    assert region.try_acquire_right(5)
    assert not region.try_acquire_right(5)
    assert region.flags[5, 0] == 1
    region.release_right(5)
    assert region.flags[5, 0] == 0


def test_workers_of_one_sender_share_a_right(new: Callable[..., KVCache]):
    one, two, receiver = new("s"), new("t"), new("r")
    _, address = receiver.prep_recv("r", PROMPT, 20, 0, 10.0)
    targets = []
    for cache in (one, two):
        cache.open_put(address, PROMPT, 0, 20)
        (target,) = cache.transport._targets.values()  # type: ignore[attr-defined]
        targets.append(target)
    region = receiver.transport.region
    first, second = targets
    assert first.try_acquire_right(7, 5)
    assert not second.try_acquire_right(7)
    assert not second.try_acquire_right(7, 6)
    assert second.try_acquire_right(7, 5)
    first.release_right(7)
    assert not region.try_acquire_right(7)
    second.release_right(7)
    assert first.try_acquire_right(7)
    assert not second.try_acquire_right(7, 5)
    first.release_right(7)
    assert region.try_acquire_right(7)
    region.release_right(7)


# Two processes


@pytest.mark.processes
def test_a_killed_sender_ends_its_quarantine(
    here: KVCache, stopped: tuple[Peer, ReceiveLease, str]
):
    sender, lease, _ = stopped
    here.release(lease.lease_id)
    assert here.page_use().quarantined == 6
    for _ in range(3):
        assert not swept(here)
    sender.kill()
    until(lambda: swept(here))
    assert here.page_use().free == here.page_use().total


@pytest.mark.processes
@pytest.mark.parametrize("wire", ["tcp"], indirect=True)
def test_a_killed_senders_last_bytes_reach_no_new_owner(peers: Callable[..., Peer]):
    """Killed while megabytes wait for the receiver; they arrive with the end of the connection."""
    layout, end = KVLayout(2, 801, 16, 4, 64, torch.float32), 390 * 16
    receiver, sender = peers("r"), peers("s")
    for peer in (receiver, sender):
        peer.call("become_big", layout)
    lease_id, address = receiver.call("prep_recv_big", end)
    sender.tell("flood", address, end)
    until(lambda: receiver.call("touched"))
    receiver.signal(signal.SIGSTOP)
    until(lambda: full(receiver))
    sender.kill()
    receiver.tell("written_after_quarantine", lease_id)
    receiver.signal(signal.SIGCONT)
    assert receiver.answer() == 0


def full(receiver: Peer) -> bool:
    """Return whether much data waits for a stopped process; if not, resume it for a moment."""
    time.sleep(0.02)
    waiting = sum(
        int(line.split()[4].partition(":")[2], 16)
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]
    )
    if waiting > 1 << 20:
        return True
    receiver.signal(signal.SIGCONT)
    receiver.signal(signal.SIGSTOP)
    return False


@pytest.mark.processes
def test_a_receiver_killed_during_the_put_is_unreachable(here: KVCache, peers: Callable[..., Peer]):
    receiver, other = peers("r"), peers("o")
    _, address = receiver.call("prep_recv", PROMPT, 21)
    put = here.open_put(address, PROMPT, 0, 21)
    receiver.kill()
    here.mark_send(sequence(here, 1, PROMPT[:21]), put, 0, 21)
    with pytest.raises(PeerUnreachable):
        put.close().result(WAIT_S)
    assert put.failed
    here.clear_mark(ONE)
    here.remove_sequence(ONE)
    lease_id, address = other.call("prep_recv", PROMPT, 21)
    send(here, address, PROMPT, 0, 21)  # the surviving process still works
    assert other.call("start_and_compare", lease_id, PROMPT) == 21


@pytest.mark.processes
def test_a_failed_connection_leaves_nothing(here: KVCache, peers: Callable[..., Peer]):
    receiver = peers("r")

    def descriptors() -> set[str]:
        return {
            f"{at.name} {at.readlink()}" for at in Path("/proc/self/fd").iterdir() if at.exists()
        }

    gc.collect()  # collect the garbage of earlier tests
    before = descriptors()
    _, address = receiver.call("prep_recv", PROMPT, 21)
    put = here.open_put(address, PROMPT, 0, 21)
    worker = weakref.ref(put._worker)  # type: ignore[attr-defined]
    assert descriptors() - before
    receiver.signal(signal.SIGKILL)
    while put.close().exception(WAIT_S) is None:  # a dying process may still accept a write
        put.renew()
    with pytest.raises(PeerUnreachable) as failure:  # the exception is kept, with its traceback
        put.close().result(WAIT_S)
    assert not descriptors() - before
    with pytest.raises(PeerUnreachable):
        here.open_put(address, PROMPT, 0, 21)
    del put, failure
    until(lambda: gc.collect() >= 0 and worker() is None)


@pytest.mark.processes
@pytest.mark.parametrize("wire", ["tcp"], indirect=True)
def test_a_stopped_receiver_times_out_over_tcp(
    here: KVCache, peers: Callable[..., Peer], monkeypatch: pytest.MonkeyPatch
):
    receiver = peers("r")
    lease_id, address = receiver.call("prep_recv", PROMPT, 21)
    put = here.open_put(address, PROMPT, 0, 21)
    receiver.signal(signal.SIGSTOP)
    with monkeypatch.context() as impatient:
        impatient.setattr(nixl_agent, "TRANSFER_TIMEOUT_S", 0.3)
        impatient.setattr(handshake, "HANDSHAKE_TIMEOUT_S", 0.3)
        put.renew()
        with pytest.raises(Timeout):
            put.close().result(WAIT_S)
        with pytest.raises(PeerUnreachable):
            here.open_put(address, PROMPT, 0, 21)
    receiver.signal(signal.SIGCONT)
    send(here, address, PROMPT, 0, 21)  # the same process, after it continues
    assert receiver.call("start_and_compare", lease_id, PROMPT) == 21


@pytest.mark.processes
@pytest.mark.parametrize("wire", ["shared"], indirect=True)
def test_a_put_completes_while_the_receiver_is_stopped(here: KVCache, peers: Callable[..., Peer]):
    """On one host, after the handshake."""
    receiver = peers("r")
    _, address = receiver.call("prep_recv", PROMPT, 21)
    send(here, address, PROMPT, 0, 21)
    lease_id, address = receiver.call("prep_recv", PROMPT, 21)
    receiver.signal(signal.SIGSTOP)
    send(here, address, PROMPT, 0, 21)
    receiver.signal(signal.SIGCONT)
    assert receiver.call("landed", lease_id) == 21
    assert receiver.call("start_and_compare", lease_id, PROMPT) == 21


@pytest.mark.processes
def test_a_dead_senders_flags_are_cleared(here: KVCache, peers: Callable[..., Peer]):
    sender = peers("s")
    _, address = here.prep_recv("r", PROMPT, 21, 0, 60.0)
    sender.call("send", address, PROMPT, 0, 21)
    assert not flags(here).any()
    sender.kill()
    until(lambda: len(here.transport._listener._free) == 119)  # type: ignore[attr-defined]
    assert not flags(here).any()


# Two networks


@pytest.fixture
def namespace() -> Iterator[tuple[str, str, str, str]]:
    """A network namespace on a veth pair: its name, our interface, our address, its address."""
    if os.geteuid() or shutil.which("ip") is None:
        pytest.skip("a network namespace takes root and ip")
    name = f"ms{secrets.token_hex(3)}"
    ours, theirs, net = f"{name}a", f"{name}b", f"10.213.{secrets.randbelow(256)}"
    commands = (
        f"netns add {name}",
        f"link add {ours} type veth peer name {theirs} netns {name}",
        f"addr add {net}.1/30 dev {ours}",
        f"link set {ours} up",
        f"-n {name} addr add {net}.2/30 dev {theirs}",
        f"-n {name} link set {theirs} up",
        f"-n {name} link set lo up",
    )
    try:
        for command in commands:
            done = subprocess.run(["ip", *command.split()], capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"no network namespace can be made here: {done.stderr.strip()}")
        yield name, ours, f"{net}.1", f"{net}.2"
    finally:
        subprocess.run(["ip", "link", "del", ours], capture_output=True)
        subprocess.run(["ip", "netns", "del", name], capture_output=True)


@pytest.mark.processes
def test_a_put_lands_in_another_network(
    namespace: tuple[str, str, str, str], monkeypatch: pytest.MonkeyPatch
):
    name, cable, our_address, their_address = namespace
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setenv("UCX_NET_DEVICES", cable)
    there = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": f"{name}b"}
    peer = Peer("r", 1, partial(NixlCommands, their_address, there, 0, name))
    here = nixl_cache(our_address, name="here")
    try:
        lease_id, address = peer.call("prep_recv", PROMPT, 21)
        send(here, address, PROMPT, 0, 21)
        assert peer.call("start_and_compare", lease_id, PROMPT) == 21
        lease, address = here.prep_recv("r", PROMPT, 21, 0, 60.0)
        peer.call("send", address, PROMPT, 0, 21)
        here.start_lease(lease.lease_id, SeqId(2), PROMPT, None)
        assert_content(here, SeqId(2), PROMPT[:21])
    finally:
        peer.kill()
        here.transport.close()
    here.check_integrity()
