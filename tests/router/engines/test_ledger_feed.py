"""The heartbeats of polled engines reach the router's ledger, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from stub_engine import StubEngine, model_info
from virtual_time import in_virtual_time

from router.base import EngineId, EngineUnreachable, RouterConfig
from router.engines import Registry
from router.ledger import FRESH_S
from router.telemetry import Metrics

CHECK_S = 0.51  # after this long every engine that is up was checked once more
RESTART_S = 3.0  # after this long the model of a restarted engine was read again


class Lender(StubEngine):
    """An engine that lends; each answer has the next heartbeat."""

    def __init__(self, id: str, available: int = 8, *, epoch: int = 1, **fields: Any) -> None:
        super().__init__(id, epoch=epoch)
        self.heartbeat: dict[str, Any] = {
            "instance": id, "epoch": epoch, "sequence": 0, "available": available, **fields,
        }  # fmt: skip

    async def state(self) -> Any:
        self.heartbeat["sequence"] += 1
        self.tells["heartbeat"] = self.heartbeat
        return await super().state()

    def restarts(self, epoch: int) -> None:
        self.tells["epoch"] = self.heartbeat["epoch"] = epoch
        self.heartbeat["sequence"] = 0


class Fleet:
    def __init__(
        self,
        tasks: asyncio.TaskGroup,
        engines: tuple[StubEngine, ...],
        metrics: Metrics | None = None,
        **config: Any,
    ) -> None:
        self.published: list[dict[str, Any]] = []
        self.swaps: list[dict[str, Any]] = []  # events
        by_url: dict[str, Any] = {engine.url: engine for engine in engines}
        events: Any = self
        self.registry = Registry(
            RouterConfig(**config), by_url.__getitem__, tasks, events, metrics=metrics
        )
        for url in by_url:
            self.registry.add(url)
        self.ledger = self.registry.ledger

    def publish(self, event: str, /, **fields: Any) -> None:
        if event == "ledger":
            self.published.append(fields)
        elif event == "debt_swap":
            self.swaps.append(fields)

    def available(self, name: str) -> int:
        return self.ledger.available(EngineId(name))

    def rows(self) -> list[str]:
        return [row["engine"] for row in self.ledger.describe()]


@asynccontextmanager
async def fleet(*engines: StubEngine, **config: Any) -> AsyncIterator[Fleet]:
    async with asyncio.TaskGroup() as tasks:
        made = Fleet(tasks, engines, **config)
        await made.registry.settled(10.0)
        try:
            yield made
        finally:
            made.registry.close()


async def _refuse() -> None:
    raise EngineUnreachable("gone")


@in_virtual_time
async def test_a_row_follows_its_engine():
    a = Lender("a", 8, lent={"b": 2})
    async with fleet(a, StubEngine("b")) as f:
        assert f.rows() == ["a"]  # the other one lends nothing
        assert f.available("a") == f.registry.lending.lendable(f.registry["a"]) == 8
        assert f.registry.lending.lendable(f.registry["b"]) == 0
        a.heartbeat.update(available=3, lent={"b": 7})
        await asyncio.sleep(CHECK_S)
        (row,) = f.ledger.describe()
        assert (row["available"], row["lent"], row["fresh"]) == (3, {"b": 7}, True)
        told = [(each["id"], each["available"], each["lent"]) for each in f.published]
        assert told == [("a", 8, {"b": 2}), ("a", 3, {"b": 7})]


@in_virtual_time
async def test_a_lost_or_removed_engine_has_no_row():
    a, b = Lender("a"), Lender("b")
    async with fleet(a, b) as f:
        a.does["health"] = _refuse
        await asyncio.sleep(5)
        assert f.rows() == ["b"]
        del a.does["health"]
        await asyncio.sleep(10)
        assert f.rows() == ["a", "b"]  # the same process, with later heartbeats
        f.registry.remove(f.registry["b"])
        assert f.rows() == ["a"]


@in_virtual_time
async def test_a_row_that_is_not_renewed_has_nothing_available():
    a = Lender("a")
    async with fleet(a, health_timeout_s=60.0) as f:
        a.does["state"] = asyncio.Event().wait  # it says nothing, and does not count as down yet
        await asyncio.sleep(FRESH_S + CHECK_S)
        assert f.rows() == ["a"] and f.available("a") == 0


@pytest.mark.parametrize("epoch", [2, 5])
@in_virtual_time
async def test_a_restarted_engine_replaces_its_row_whatever_its_clock_says(epoch: int):
    a = Lender("a", 8, epoch=3)
    async with fleet(a) as f:
        a.restarts(epoch)
        a.heartbeat["available"] = 4
        await asyncio.sleep(RESTART_S)
        (row,) = f.ledger.describe()
        assert (row["epoch"], row["available"]) == (epoch, 4)
        assert f.registry["a"].describe()["last_error"] is None
        a.restarts(9)
        a.tells["heartbeat"] = None  # without --lend-share
        a.state = super(Lender, a).state  # type: ignore[method-assign]
        await asyncio.sleep(RESTART_S)
        assert f.rows() == []


@in_virtual_time
async def test_a_heartbeat_for_another_engine_is_refused_and_shown():
    a, b = Lender("a"), Lender("b")
    b.heartbeat.update(instance="a", epoch=9)
    async with fleet(a, b) as f:
        await asyncio.sleep(CHECK_S)
        assert f.rows() == ["a"] and f.available("a") == 8
        assert "another process" in f.registry["b"].describe()["last_error"]
        assert f.registry["b"].usable
        b.heartbeat.update(instance="b", epoch=1, lent={"b": 1})
        await asyncio.sleep(CHECK_S)
        assert "owes pages to itself" in f.registry["b"].describe()["last_error"]
        b.heartbeat.update(lent={})
        await asyncio.sleep(CHECK_S)
        assert f.rows() == ["a", "b"]
        assert f.registry["b"].describe()["last_error"] is None


@in_virtual_time
async def test_of_two_engines_with_one_name_the_later_process_counts():
    first, second = Lender("a", 8, epoch=1), Lender("a", 5, epoch=2)
    second.url = "http://other:1"
    async with fleet(first, second) as f:
        await asyncio.sleep(CHECK_S)
        assert f.rows() == ["a"] and f.available("a") == 5
        first.does["health"] = _refuse
        await asyncio.sleep(5)
        assert f.available("a") == 5
        second.does["health"] = _refuse
        del first.does["health"]
        await asyncio.sleep(10)
        assert f.available("a") == 8


@in_virtual_time
async def test_creditors_are_engines_that_exchange_kv_with_the_debtor():
    a, b, other = Lender("a", 8), Lender("b", 5), Lender("other", 99)
    other.info = model_info(fingerprint="g")
    async with fleet(a, b, other) as f:
        await asyncio.sleep(CHECK_S)
        found = f.ledger.creditors(EngineId("b"), 4)
        assert [each.instance for each in found] == ["a"]
        assert f.ledger.creditors(EngineId("stranger"), 1) == []
        f.registry.drain(f.registry["a"], True)
        await asyncio.sleep(CHECK_S)
        assert f.available("a") == 8 and f.ledger.creditors(EngineId("b"), 4) == []


@in_virtual_time
async def test_the_metrics_show_the_ledger():
    metrics = Metrics()
    async with fleet(Lender("a", 8, lent={"b": 2, "c": 1}, borrowed={"d": 4})) as f:
        f.registry.set_gauges(metrics)
        text = metrics.render().decode()
        assert 'microserve_router_ledger_available{engine="a"} 8.0' in text
        assert 'microserve_router_ledger_lent{engine="a"} 3.0' in text
        assert 'microserve_router_ledger_borrowed{engine="a"} 4.0' in text
        f.registry.remove(f.registry["a"])
        f.registry.set_gauges(metrics)
        assert "ledger_lent{" not in metrics.render().decode()
