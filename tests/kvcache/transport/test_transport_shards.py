"""Re-sharding (DistServe) over every transport: any split of a model into any other.

Each worker is a transport with a pool for its part of the model. Every worker of the sender puts
into every worker of the receiver. Afterwards each element is in its place, was written once, and
nothing else has changed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace

import pytest
import torch
from cuda_devices import cuda_ipc_transport, needs_cuda, settle
from fake_device import fake_device_transport
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_helpers import make_cache

from kvcache.lease.address import KVAddress
from kvcache.memory.layout import KVLayout
from kvcache.shard import Shard, overlap, split
from kvcache.transport import (
    MemoryNetwork,
    MemoryTransport,
    NixlTransport,
    Put,
    ShmTransport,
    Transport,
)
from kvcache.transport.nixl.agent import has_nixl
from kvcache.types import PageId

SIZE, DIM, WAIT_S = 4, 2, 20.0
UNTOUCHED = -1.0

Make = Callable[[int], Transport]


@dataclass(frozen=True)
class Case:
    """A model, two splits of it as (pp, tp), and the positions to put, in two chunks."""

    layers: int
    heads: int
    sender: tuple[int, int]
    receiver: tuple[int, int]
    end: int
    middle: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    layers, heads = draw(st.integers(1, 5)), draw(st.integers(1, 4))

    def parts() -> tuple[int, int]:
        return draw(st.integers(1, min(layers, 3))), draw(st.integers(1, min(heads, 3)))

    end = draw(st.integers(2, 22))
    return Case(layers, heads, parts(), parts(), end, draw(st.integers(1, end - 1)))


def makers() -> dict[str, Make]:
    network = MemoryNetwork()
    return {
        "memory": lambda epoch: MemoryTransport(network, epoch),
        "shm": ShmTransport,
        "device": fake_device_transport,
    }


@pytest.mark.parametrize("kind", ["memory", "shm", "device"])
@settings(max_examples=30, deadline=None)
@given(case=cases())
def test_any_split_into_any_other(kind: str, case: Case):
    reshard(makers()[kind], case)


@needs_cuda
@settings(max_examples=3, deadline=None)
@given(case=cases())
def test_any_split_into_any_other_on_a_gpu(case: Case):
    reshard(cuda_ipc_transport, case)


@pytest.mark.slow
@pytest.mark.skipif(
    not has_nixl(),
    reason="NIXL is not installed: pip install -e '.[nixl]'",
)
@settings(max_examples=2, deadline=None)
@given(case=cases())
def test_any_split_into_any_other_over_nixl(case: Case):
    reshard(lambda epoch: NixlTransport(epoch, secret=b"wire"), case)


def reshard(make: Make, case: Case) -> None:
    model = KVLayout(case.layers, 8, SIZE, case.heads, DIM, torch.float32)
    with ExitStack() as stack:
        senders, receivers = [], []
        for shard in shards(case, case.sender):
            senders.append(make(1))
            senders[-1].register(senders[-1].allocate(replace(model, pages=10, shard=shard)))
            stack.callback(senders[-1].close)
        for number, shard in enumerate(shards(case, case.receiver)):
            layout = replace(model, pages=16 + number, shard=shard)
            transport = make(2)
            stack.callback(transport.close)
            receivers.append(make_cache(transport, layout, name=f"r{number}", epoch=2))
        pages = [PageId(page) for page in (9, 2, 3, 7, 1, 5)]  # of every sender
        for sender in senders:
            fill(sender.region.pool, sender.region.layout.held, pages)
        for receiver in receivers:
            receiver.store.pool[:] = UNTOUCHED
            settle(receiver.store.pool)
            lease, text = receiver.prep_recv("r", list(range(case.end)), case.end, 0, 60.0)
            address = KVAddress.verify(text, b"secret")
            puts = open_all(senders, address)
            for begin, end in ((0, case.middle), (case.middle, case.end)):
                for sender, put in zip(senders, puts, strict=True):
                    put.write(range(sender.region.layout.held.layers), pages, begin, end)
                for put in puts[1:]:
                    put.close().result(WAIT_S)
                puts[0].signal(end)
                puts[0].close().result(WAIT_S)
                assert receiver.lease(lease.lease_id).landed == end

            held = receiver.layout.held
            wanted = torch.full_like(receiver.store.pool, UNTOUCHED)
            fill(wanted, held, lease.own, case.end)
            assert torch.equal(receiver.store.pool, wanted)
            # Everything arrived, and no more bytes were written: so each byte was written once.
            there = case.end * held.layers * receiver.layout.token_bytes
            assert sum(put.bytes_sent for put in puts) == there
            for sender, put in zip(senders, puts, strict=True):
                common = overlap(sender.region.layout.held, held)
                assert bool(put.bytes_sent) == (common is not None)
            receiver.release(lease.lease_id)


def shards(case: Case, parts: tuple[int, int]) -> list[Shard]:
    return split(case.layers, case.heads, pp=parts[0], tp=parts[1])


def open_all(senders: list[Transport], address: KVAddress) -> list[Put]:
    """The first worker claims the lease, the others join."""
    lead = senders[0].open(address, 0)
    return [lead, *(sender.open(address, 0, join=lead.claim) for sender in senders[1:])]


def fill(pool: torch.Tensor, held: Shard, pages: list[PageId], end: int | None = None) -> None:
    """Write a worker's part of the positions up to `end`; each value occurs once in the model."""
    end = len(pages) * SIZE if end is None else end
    for layer in range(held.layers):
        for position in range(end):
            page, slot = divmod(position, SIZE)
            for half in range(2):
                for head in range(held.heads):
                    place = ((held.layer + layer) * 32 + position) * 2 + half
                    first = (place * 8 + held.head + head) * DIM
                    numbers = torch.arange(float(first), float(first + DIM))
                    pool[layer, pages[page], half, slot, head] = numbers
