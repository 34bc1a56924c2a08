"""Transfers between virtual engines: bandwidth, and max-min fair shares of links."""

from __future__ import annotations

import asyncio

import pytest
from virtual_time import in_virtual_time

from engine.latency import PutLatency
from engine.virtual.network import Link, Transfer, VirtualNetwork


def links(*bandwidths: float) -> list[Link]:
    return [Link(PutLatency(bandwidth=bandwidth)) for bandwidth in bandwidths]


class Ends:
    """Notes when transfers end."""

    def __init__(self, network: VirtualNetwork) -> None:
        self.network = network
        self.times: dict[str, float] = {}

    def start(self, name: str, source: Link, target: Link, size: float) -> Transfer:
        now = asyncio.get_running_loop().time

        def done() -> None:
            self.times[name] = now()

        return self.network.start(source, target, size, done)


@in_virtual_time
async def test_a_transfer_alone_takes_the_time_of_the_narrower_link():
    ends = Ends(VirtualNetwork())
    a, b, c = links(100.0, 100.0, 20.0)
    ends.start("a to b", a, b, 300.0)
    await asyncio.sleep(10)
    ends.start("b to c", b, c, 300.0)
    await asyncio.sleep(30)
    assert ends.times == {"a to b": pytest.approx(3), "b to c": pytest.approx(10 + 15)}
    assert ends.network.bytes == pytest.approx(600)


@in_virtual_time
async def test_the_directions_of_a_link_do_not_share():
    ends = Ends(VirtualNetwork())
    a, b = links(100.0, 100.0)
    ends.start("there", a, b, 100.0)
    ends.start("back", b, a, 200.0)
    await asyncio.sleep(9)
    assert ends.times == {"there": pytest.approx(1), "back": pytest.approx(2)}


@in_virtual_time
async def test_transfers_share_a_link_and_what_one_leaves_goes_to_the_others():
    """Until second 2 both have 50 bytes a second; then the longer one has all."""
    ends = Ends(VirtualNetwork())
    a, b, c = links(100.0, 100.0, 100.0)
    ends.start("short", a, c, 100.0)
    ends.start("long", b, c, 300.0)
    await asyncio.sleep(9)
    assert ends.times == {"short": pytest.approx(2), "long": pytest.approx(4)}


@in_virtual_time
async def test_shares_are_max_min_fair():
    """Three transfers into c have 20 each; the fourth has what the first leaves of a: 80."""
    ends = Ends(VirtualNetwork())
    a, b, c, d = links(100.0, 100.0, 60.0, 100.0)
    transfers = [
        ends.start("1", a, c, 1e6), ends.start("2", b, c, 1e6), ends.start("3", d, c, 1e6),
        ends.start("4", a, d, 1e6),
    ]  # fmt: skip
    assert [transfer.rate for transfer in transfers] == [20.0, 20.0, 20.0, 80.0]
    for link in (a, b, c, d):
        for carried in (link.outgoing, link.incoming):
            assert sum(transfer.rate for transfer in carried) <= link.latency.bandwidth


@in_virtual_time
async def test_a_stopped_transfer_ends_at_once_and_leaves_its_share():
    ends = Ends(VirtualNetwork())
    a, b = links(100.0, 100.0)
    stopped = ends.start("stopped", a, b, 1000.0)
    ends.start("other", a, b, 150.0)
    await asyncio.sleep(1)
    ends.network.stop(stopped)
    ends.network.stop(stopped)
    await asyncio.sleep(99)
    assert ends.times == {"other": pytest.approx(2)}
    assert not (a.outgoing or b.incoming)
    assert ends.network.bytes == pytest.approx(50 + 150)


@in_virtual_time
async def test_many_random_transfers_carry_all_their_bytes_and_exceed_no_link():
    """A link that is busy all the time carries its bandwidth: none of it is lost."""
    ends = Ends(VirtualNetwork())
    engines = links(*(50.0 + 10 * i for i in range(6)))
    total = 0.0
    for i in range(200):
        source, target = engines[i % 6], engines[(i * 5 + i // 6 + 1) % 6]
        size = 10.0 + (i * 37) % 200
        total += size
        ends.start(str(i), source, target, size)
        for link in engines:
            for carried in (link.outgoing, link.incoming):
                used = sum(transfer.rate for transfer in carried)
                assert used <= link.latency.bandwidth * (1 + 1e-9)
        await asyncio.sleep(0.05)
    await asyncio.sleep(3600)
    assert len(ends.times) == 200
    assert ends.network.bytes == pytest.approx(total)
