"""Cycles of debts are swapped away by orders to their debtors, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from test_creditor_lists import BORROWS
from test_ledger_feed import CHECK_S, Lender, fleet
from virtual_time import in_virtual_time

from engine.protocol import LendHomeReply, StaleEpoch
from router.base import EngineUnreachable
from router.engines import Registry
from router.ledger.rebalancing import ANSWER_S, FIRST_REST_S, FREEZE_S, LONGEST_REST_S
from router.telemetry import Metrics

BLOCK = 8  # pages of the stubs


class Ringed(Lender):
    """An engine that borrows and lends, and the orders that it has got.

    It brings everything home at once, which its heartbeats and those of `others` then show.
    """

    def __init__(self, id: str, *, epoch: int = 1, **fields: Any) -> None:
        super().__init__(id, 0, epoch=epoch, **fields)
        self.tells["borrowing"] = BORROWS
        self.orders: list[dict[str, Any]] = []
        self.others: dict[str, Ringed] = {}
        self.answers: Callable[[dict[str, Any]], Awaitable[int]] = self.settle

    async def set_creditors(self, body: dict[str, Any], headers: object) -> None:
        pass

    async def bring_home(self, body: dict[str, Any], headers: object) -> LendHomeReply:
        self.orders.append(body)
        return LendHomeReply(blocks=await self.answers(body))

    async def settle(self, order: dict[str, Any]) -> int:
        await asyncio.sleep(0.1)
        creditor, pages = order["creditor"], order["blocks"] * BLOCK
        accounts = [(self, "borrowed", creditor)]
        if other := self.others.get(creditor):
            accounts.append((other, "lent", self.heartbeat["instance"]))
        for engine, side, name in accounts:
            engine.heartbeat[side] = engine.heartbeat[side] | {
                name: engine.heartbeat[side][name] - pages
            }
            if not engine.heartbeat[side][name]:
                del engine.heartbeat[side][name]
        return int(order["blocks"])


def ring(**pages: int) -> list[Ringed]:
    """Return engines of which each owes so many pages to the next one, by name."""
    names = list(pages)
    engines = {
        name: Ringed(
            name,
            borrowed={names[(at + 1) % len(names)]: pages[name]},
            lent={names[at - 1]: pages[names[at - 1]]},
            epoch=at + 3,
        )
        for at, name in enumerate(names)
    }
    for engine in engines.values():
        engine.others = engines
    return list(engines.values())


def swaps(registry: Registry) -> dict[str, Any]:
    shown: dict[str, Any] = registry.lending.describe()["swaps"]
    return shown


@in_virtual_time
async def test_all_debtors_of_a_cycle_are_told_at_once_and_by_its_smallest_debt():
    a, b, c = ring(a=5 * BLOCK, b=3 * BLOCK + 5, c=4 * BLOCK)
    async with fleet(a, b, c) as f:
        await asyncio.sleep(3 * CHECK_S)
        for engine, creditor, epoch in ((a, "b", 4), (b, "c", 5), (c, "a", 3)):
            (order,) = engine.orders
            assert order == {
                "swap": a.orders[0]["swap"], "creditor": creditor, "creditor_epoch": epoch,
                "blocks": 3, "freeze_ms": 1000 * FREEZE_S,
            }  # fmt: skip
        assert swaps(f.registry)["running"] == []
        (done,) = swaps(f.registry)["ended"]
        assert (done["outcome"], done["blocks"]) == ("done", 3)
        assert done["home"] == {"a": 3, "b": 3, "c": 3} and done["refused"] == {}
        began, ended = f.swaps
        assert ended == done
        nothing_yet = {"outcome": None, "seconds": None, "home": {}}
        assert began == done | nothing_yet
        await asyncio.sleep(2 * FIRST_REST_S)
        assert len(a.orders) == 1  # 5 pages are no block


@in_virtual_time
async def test_no_cycle_no_order_and_none_below_the_threshold():
    a, b = ring(a=20 * BLOCK, b=3 * BLOCK)
    chain = Ringed("x", borrowed={"a": 5 * BLOCK}), Ringed("y", borrowed={"x": BLOCK})
    a.heartbeat["lent"] |= {"x": 5 * BLOCK}
    chain[0].heartbeat["lent"] = {"y": BLOCK}
    async with fleet(a, b, *chain, swap_blocks=4) as f:
        await asyncio.sleep(5)
        assert not any(engine.orders for engine in (a, b, *chain))
    async with fleet(a, b, *chain, swap_blocks=0) as f:
        await asyncio.sleep(5)
        assert not a.orders and swaps(f.registry) == {"running": [], "ended": []}
    async with fleet(a, b, *chain, swap_blocks=3):
        await asyncio.sleep(5)
        assert len(a.orders) == len(b.orders) == 1 and not chain[0].orders


@in_virtual_time
async def test_one_swap_of_an_engine_at_a_time():
    """Two cycles share an engine; the second one begins after the first, by new heartbeats."""
    a, b = ring(a=4 * BLOCK, b=4 * BLOCK)
    c = Ringed("c", borrowed={"a": 2 * BLOCK}, lent={"a": 2 * BLOCK})
    a.heartbeat["borrowed"] |= {"c": 2 * BLOCK}
    a.heartbeat["lent"] |= {"c": 2 * BLOCK}
    c.others = a.others = {"a": a, "b": b, "c": c}
    running = most = 0

    def counted(engine: Ringed) -> Callable[[dict[str, Any]], Awaitable[int]]:
        async def bring(order: dict[str, Any]) -> int:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(2)
            running -= 1
            return await Ringed.settle(engine, order)

        return bring

    for engine in (a, b, c):
        engine.answers = counted(engine)
    async with fleet(a, b, c) as f:
        await asyncio.sleep(CHECK_S)
        assert len(swaps(f.registry)["running"]) == 1
        await asyncio.sleep(10)
        assert most == 2  # the two debtors of one cycle
        assert [order["creditor"] for order in a.orders] == ["b", "c"]
        assert [each["outcome"] for each in swaps(f.registry)["ended"]] == ["done", "done"]


@in_virtual_time
async def test_a_cycle_that_brings_nothing_home_rests_longer_and_longer():
    a, b = ring(a=BLOCK, b=BLOCK)
    times: list[float] = []

    async def nothing(order: dict[str, Any]) -> int:
        times.append(asyncio.get_running_loop().time())
        return 0

    a.answers = b.answers = nothing
    async with fleet(a, b) as f:
        await asyncio.sleep(3 * LONGEST_REST_S)
        gaps = [later - earlier for earlier, later in zip(times[::2], times[2::2], strict=False)]
        assert len(gaps) == 6
        for gap, rest in zip(gaps, (5, 10, 20, 40, 80, 80), strict=True):
            assert rest <= gap <= rest + 2 * CHECK_S
        assert (FIRST_REST_S, LONGEST_REST_S) == (5, 80)
        assert {each["outcome"] for each in swaps(f.registry)["ended"]} == {"nothing"}


@pytest.mark.parametrize("how", ["stale", "gone", "silent", "killed"])
@in_virtual_time
async def test_errors_end_a_swap_and_the_others_bring_home_what_they_can(how: str):
    a, b, c = ring(a=BLOCK, b=BLOCK, c=BLOCK)

    async def fails(order: dict[str, Any]) -> int:
        if how == "stale":
            raise StaleEpoch("restarted")
        if how == "gone":
            raise EngineUnreachable("gone")
        if how == "killed":  # its health check notices
            b.does["health"] = b.does["state"] = gone
        await asyncio.Event().wait()
        return 1

    async def gone() -> None:
        raise EngineUnreachable("gone")

    b.answers = fails
    metrics = Metrics()
    async with fleet(a, b, c, metrics=metrics) as f:
        await asyncio.sleep(FREEZE_S + ANSWER_S + 3)
        (ended,) = swaps(f.registry)["ended"]
        assert ended["home"] == {"a": 1, "c": 1} and ended["outcome"] == "partly"
        wanted = {"stale": "stale_epoch", "silent": "timeout"}
        reason = wanted.get(how, "peer_unreachable")
        assert ended["refused"]["b"]["type"] == reason
        assert ended["seconds"] < (FREEZE_S if how != "silent" else FREEZE_S + ANSWER_S + 1)
        text = metrics.render().decode()
        assert 'debt_swaps_total{outcome="partly"} 1.0' in text
        assert "debt_swap_blocks_total 2.0" in text
        assert f'debt_swap_refusals_total{{reason="{reason}"}} 1.0' in text
        assert f.registry["a"].status == f.registry["c"].status == "up"


@in_virtual_time
async def test_a_swap_under_way_ends_with_the_router():
    a, b = ring(a=BLOCK, b=BLOCK)
    ended = []

    async def endless(order: dict[str, Any]) -> int:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(order["creditor"])
        return 0

    a.answers = b.answers = endless
    async with fleet(a, b) as f:
        await asyncio.sleep(CHECK_S)
        assert [each["cycle"] for each in swaps(f.registry)["running"]] == [["a", "b"]]
    assert sorted(ended) == ["a", "b"]


@in_virtual_time
async def test_what_two_sides_do_not_both_say_begins_no_swap():
    a, b = ring(a=BLOCK, b=BLOCK)
    b.heartbeat["lent"] = {}  # the heartbeats are of different times
    async with fleet(a, b):
        await asyncio.sleep(2)
        assert not a.orders
        b.heartbeat["lent"] = {"a": BLOCK}
        await asyncio.sleep(2)
        assert len(a.orders) == len(b.orders) == 1


@in_virtual_time
async def test_of_several_routers_one_orders_swaps():
    a, b = ring(a=BLOCK, b=BLOCK)
    async with fleet(a, b) as f:
        f.registry.lending.orders_swaps = lambda: False
        await asyncio.sleep(3)
        assert not a.orders
        f.registry.lending.orders_swaps = lambda: True
        await asyncio.sleep(1)
        assert len(a.orders) == len(b.orders) == 1
