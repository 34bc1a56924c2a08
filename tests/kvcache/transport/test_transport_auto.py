"""One region for peers of this host and of others: the way of each, and rights that exclude both.

A peer on another host is a process that believes to be there, so it takes the network.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from auto_peer import FarCommands, NearCommands
from kv_helpers import assert_content, make_cache, send, small_layout
from shm_peer import PAGES, Peer

from kvcache.cache import KVCache
from kvcache.errors import BadRequest, MicroserveError, PeerUnreachable
from kvcache.lease import KVAddress
from kvcache.memory import FlaggedRegion
from kvcache.transport import (
    AutoTransport,
    Network,
    NixlTransport,
    ShmTransport,
    endpoint,
    listen,
    make_transport,
)
from kvcache.transport.nixl import agent as nixl_agent
from kvcache.types import SeqId, SlotIndex

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not nixl_agent.has_nixl(),
        reason="NIXL is not installed: pip install -e '.[nixl]'",
    ),
]

PROMPT = list(range(100, 122))
ONE = SeqId(1)
HERE, THERE = "127.0.0.1", "127.0.0.2"
WIRE = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[KVCache]:
    for name, value in WIRE.items():
        monkeypatch.setenv(name, value)
    cache = make_cache(
        AutoTransport(1, secret=b"wire", network=Network(HERE)), small_layout(PAGES), name="here"
    )
    yield cache
    cache.sweep()
    cache.check_integrity()
    cache.close()


@pytest.fixture
def peers() -> Iterator[Callable[[str, type[NearCommands]], Peer]]:
    """Return a function that starts processes; at the end they are killed."""
    started: list[Peer] = []

    def start(name: str, where: type[NearCommands]) -> Peer:
        host = f"127.0.0.{len(started) + 2}"
        started.append(Peer(name, 1, partial(where, host, WIRE)))
        return started[-1]

    yield start
    for peer in started:
        peer.kill()


def region_of(cache: KVCache) -> FlaggedRegion:
    region = cache.transport.region
    assert isinstance(region, FlaggedRegion)
    return region


def connected(cache: KVCache) -> int:
    """Return how many senders have come by the network."""
    transport: Any = cache.transport
    return len(transport._far._listener._senders)


@pytest.mark.processes
@pytest.mark.parametrize(("where", "by_network"), [(NearCommands, 0), (FarCommands, 1)])
def test_each_peer_takes_its_way(
    here: KVCache,
    peers: Callable[..., Peer],
    where: type[NearCommands],
    by_network: int,
):
    peer = peers("p", where)
    lease, address = here.prep_recv("r", PROMPT, 21, 0, 60.0)
    peer.call("send", address, PROMPT, 0, 21)
    assert connected(here) == by_network
    here.start_lease(lease.lease_id, ONE, PROMPT, 21)
    assert_content(here, ONE, PROMPT[:21])
    lease_id, back = peer.call("prep_recv", PROMPT, 21)
    KVAddress.verify(back, b"secret")
    send(here, back, PROMPT, 0, 21)
    assert peer.call("start_and_compare", lease_id, PROMPT) == 21


@pytest.mark.processes
@pytest.mark.parametrize(
    ("first", "second"), [(NearCommands, FarCommands), (FarCommands, NearCommands)]
)
def test_a_stopped_writer_keeps_others_out_until_it_is_killed(
    here: KVCache,
    peers: Callable[..., Peer],
    first: type[NearCommands],
    second: type[NearCommands],
):
    holder, other = peers("s", first), peers("t", second)
    lease, address = here.prep_recv("r", PROMPT, 21, 0, 60.0)
    slot = KVAddress.verify(address, b"secret").slot
    holder.tell("send_and_stop_within", address, PROMPT, 21)
    holder.wait_until_stopped()
    assert not region_of(here).try_acquire_right(slot)
    with pytest.raises(MicroserveError, match="write right"):
        other.call("send", address, PROMPT, 0, 21)
    holder.kill()
    other.call("send", address, PROMPT, 0, 21)  # flags of a dead holder are lowered
    here.start_lease(lease.lease_id, ONE, PROMPT, 21)
    assert_content(here, ONE, PROMPT[:21])


@pytest.mark.processes
@pytest.mark.parametrize("where", [NearCommands, FarCommands])
def test_a_released_lease_is_in_quarantine_until_its_stopped_writer_ends(
    here: KVCache, peers: Callable[..., Peer], where: type[NearCommands]
):
    writer = peers("s", where)
    lease, address = here.prep_recv("r", PROMPT, 21, 0, 60.0)
    writer.tell("send_and_stop_within", address, PROMPT, 21)
    writer.wait_until_stopped()
    here.release(lease.lease_id)
    here.sweep()
    assert here.page_use().quarantined == 6
    writer.kill()
    pause = threading.Event()
    for _ in range(200):
        here.sweep()
        if not here.page_use().quarantined:
            break
        pause.wait(0.02)
    assert here.page_use().quarantined == 0


def test_an_engine_with_shared_memory_only_is_reached_and_reaches(here: KVCache):
    plain = make_cache(ShmTransport(2), small_layout(PAGES), name="plain", epoch=2)
    for sender, receiver in ((here, plain), (plain, here)):
        lease, address = receiver.prep_recv("r", PROMPT, 21, 0, 60.0)
        send(sender, address, PROMPT, 0, 21)
        receiver.start_lease(lease.lease_id, ONE, PROMPT, 21)
        assert_content(receiver, ONE, PROMPT[:21])
        receiver.remove_sequence(ONE)
    plain.check_integrity()
    plain.close()


def test_an_engine_with_shared_memory_only_does_not_reach_other_hosts(
    here: KVCache, monkeypatch: pytest.MonkeyPatch
):
    _, address = here.prep_recv("r", PROMPT, 21, 0, 60.0)
    plain = make_cache(ShmTransport(2), small_layout(PAGES), name="plain", epoch=2)
    monkeypatch.setattr(endpoint, "host_id", lambda: "elsewhere")
    with pytest.raises(PeerUnreachable, match="another host"):
        plain.open_put(address, PROMPT, 0, 21)
    plain.close()


@pytest.mark.parametrize("text", ["auto:", "auto:x", "auto:x:1:2", "auto:x:1:2:", "auto:x:1:2:h:p"])
def test_a_malformed_endpoint_is_unreachable(here: KVCache, text: str):
    _, address = here.prep_recv("r", PROMPT, 21, 0, 60.0)
    signed = KVAddress.verify(address, b"secret")
    with pytest.raises(PeerUnreachable):
        here.transport.open(replace(signed, endpoint=text), 0)


def test_a_right_is_never_held_by_a_host_and_a_network_at_a_time():
    """A thread plays a sender behind a network: it raises its flag and then reads the others."""
    region = FlaggedRegion.create(small_layout(3), 1)
    slot, party, inside, both = SlotIndex(7), 5, [False, False], []
    stop = threading.Event()

    def sender() -> None:
        while not stop.is_set():
            region.flags[slot, party] = 1
            others = region.flags[slot].copy()
            others[party] = 0
            if not others.any():
                inside[1] = True
                both.append(inside[0])
                inside[1] = False
            region.flags[slot, party] = 0

    thread = threading.Thread(target=sender)
    thread.start()
    taken = 0
    give_up = time.monotonic() + 20
    for share in itertools.cycle((0, 77)):
        if taken > 200 or time.monotonic() > give_up:
            break
        if region.try_acquire_right(slot, share):
            taken += 1
            inside[0] = True
            both.append(inside[1])
            inside[0] = False
            region.release_right(slot)
    stop.set()
    thread.join()
    assert taken > 100
    assert len(both) > taken
    assert not any(both)
    assert not region.flags.any()
    region.close()


def test_a_shared_right_is_lowered_by_the_last_process_that_has_it():
    first = FlaggedRegion.create(small_layout(3), 1)
    second = FlaggedRegion.attach(os.getpid(), first.fd, 1, small_layout(3))
    slot = SlotIndex(3)
    assert first.try_acquire_right(slot, 9)
    assert second.try_acquire_right(slot, 9)
    first.release_right(slot)
    assert first.flags[slot, 0] == 9
    assert not first.try_acquire_right(slot)
    second.release_right(slot)
    assert first.flags[slot, 0] == 0
    assert first.try_acquire_right(slot)
    first.release_right(slot)


@pytest.mark.parametrize("share", [0, 9])
def test_flags_that_a_dead_holder_left_are_lowered(share: int):
    region = FlaggedRegion.create(small_layout(3), 1)
    region.flags[4, 0] = share or 1
    region.flags[5, 0] = 1
    assert region.try_acquire_right(SlotIndex(5))  # a living holder's stays
    region.lower_stale()
    assert region.flags[4, 0] == 0
    assert region.flags[5, 0] == 1


# What comes back


@pytest.mark.parametrize("verify", ["sampled", "always"])
def test_bytes_that_arrive_differently_are_noticed(
    here: KVCache, monkeypatch: pytest.MonkeyPatch, verify: Any
):
    lease, address = here.prep_recv("r", PROMPT, 21, 0, 60.0)
    network = Network(THERE, verify=verify)
    sender = make_cache(
        NixlTransport(2, secret=b"wire", network=network), small_layout(PAGES), name="s", epoch=2
    )
    send(sender, address, PROMPT, 0, 8)  # as it should be
    assert here.lease(lease.lease_id).landed == 8
    usual = nixl_agent.Agent.transfer

    def flip(agent: nixl_agent.Agent, direction: Any, pieces: Any, check: Any) -> None:
        usual(agent, direction, pieces, check)
        if direction == "WRITE" and int(pieces[:, 2].max()) > 8:  # not the words
            here.store.pool[:, list(lease.own)] += 1

    monkeypatch.setattr(nixl_agent.Agent, "transfer", flip)
    with pytest.raises(PeerUnreachable, match="other bytes"):
        send(sender, address, PROMPT, 8, 21, chunk=13)
    assert here.lease(lease.lease_id).landed == 8
    monkeypatch.undo()
    sender.close()


def test_all_is_compared_where_a_sample_may_miss_it(here: KVCache, monkeypatch: pytest.MonkeyPatch):
    lease, address = here.prep_recv("r", PROMPT, 21, 0, 60.0)
    sender = make_cache(
        NixlTransport(2, secret=b"wire", network=Network(THERE, verify="always")),
        small_layout(PAGES),
        name="s",
        epoch=2,
    )
    usual, last = nixl_agent.Agent.transfer, lease.own[5]

    def flip(agent: nixl_agent.Agent, direction: Any, pieces: Any, check: Any) -> None:
        usual(agent, direction, pieces, check)
        if direction == "WRITE" and len(pieces) > 1:
            here.store.pool[-1, last, 1, 0, 0, 0] += 1  # one number of the last page

    monkeypatch.setattr(nixl_agent.Agent, "transfer", flip)
    with pytest.raises(PeerUnreachable, match="other bytes"):
        send(sender, address, PROMPT, 0, 21, chunk=21)
    assert here.lease(lease.lease_id).landed == 0
    monkeypatch.undo()
    sender.close()


# Settings


def test_what_auto_means(monkeypatch: pytest.MonkeyPatch):
    def kind(network: Network) -> type:
        transport = make_transport("auto", 1, secret=b"", network=network)
        transport.close()
        return type(transport)

    far = Network("10.9.8.7")
    assert kind(Network("")) is ShmTransport
    assert kind(Network("localhost")) is ShmTransport
    assert kind(far) is AutoTransport
    monkeypatch.setattr(nixl_agent, "PACKAGES", ("there_is_no_such_package",))
    assert kind(far) is ShmTransport


def test_ports_are_taken_from_the_range():
    with listen(HERE, range(1), backlog=1) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            listen(HERE, range(port, port + 1), backlog=1)
        with listen(HERE, range(port, min(port + 50, 65536)), backlog=1) as found:
            assert port < found.getsockname()[1] < port + 50


def test_settings_reach_ucx(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "environ", {})
    Network("10.0.0.1", range(9000, 9064), "eth7").configure_ucx()
    assert os.environ["UCX_NET_DEVICES"] == "eth7"
    assert os.environ["UCX_TCP_PORT_RANGE"] == "9000-9063"


def test_peers_cannot_reach_a_wildcard():
    with pytest.raises(BadRequest, match="reach"):
        Network("0.0.0.0").check()
