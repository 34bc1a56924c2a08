"""The ledger of a registry's engines, and whom it tells what."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from engine.protocol import EngineState, Heartbeat, LendCreditors, LendHome, LendHomeReply
from router.base import EngineId, RouterConfig
from router.engines.backend import Backend, guard
from router.engines.lending.room import Rooms
from router.ledger import (
    FRESH_S,
    BlockSwap,
    CreditorLists,
    Debtor,
    Heartbeats,
    Ledger,
    Rebalancing,
)
from router.telemetry import Events, Metrics

__all__ = ["Lending"]

MISSED = 3  # checks of an engine, after which its row of the ledger is too old
NO_HEADERS: dict[str, str] = {}


class Lending:
    """Keeps the ledger as engines answer and are lost; sends creditor lists and orders of swaps."""

    def __init__(
        self,
        config: RouterConfig,
        backends: Callable[[], Collection[Backend]],
        tasks: asyncio.TaskGroup,
        events: Events,
        metrics: Metrics | None,
    ) -> None:
        """`backends` returns the engines that are known now."""
        self._backends, self._events, self._metrics = backends, events, metrics
        self._known: dict[str, Backend] = {}  # by the names that engines use among themselves
        self.ledger = Ledger(
            self._cost,
            asyncio.get_running_loop().time,
            fresh_s=max(FRESH_S, MISSED * config.health_interval_s),
        )
        self._heartbeats = Heartbeats(self.ledger, self._debts_changed)
        self._creditor_lists = CreditorLists(self.ledger, self._debtors, self._url_of, tasks)
        self._rebalancing = Rebalancing(
            self.ledger,
            self._debtors,
            tasks,
            least=config.swap_blocks,
            begun=self._swap_begun,
            ended=self._swap_ended,
        )
        # Whether this router orders swaps, and no other one of the fleet.
        self.orders_swaps: Callable[[], bool] = lambda: True
        self.rooms = Rooms(self.ledger, backends, config.max_queue)

    def heard(self, state: EngineState, before: EngineState | None) -> str:
        """Enter the heartbeat of a state, as `Heartbeats.heard`."""
        return self._heartbeats.heard(state, before)

    @staticmethod
    def concerns(state: EngineState | None) -> bool:
        """Return whether a state is of an engine that lends or borrows."""
        return state is not None and (state.heartbeat is not None or state.borrowing is not None)

    def changed(self) -> None:
        """Tell engines what follows from the latest heartbeats and the health of the fleet."""
        states = ((each, each.state) for each in self._backends())
        self._known = {state.engine_id: each for each, state in states if state is not None}
        self._creditor_lists.send()
        if self.orders_swaps():
            self._rebalancing.look()
        self.rooms.changed()

    def lost(self, backend: Backend) -> None:
        """Forget what an engine said that is lost."""
        self._heartbeats.lost(backend.state)
        self.changed()

    def lendable(self, backend: Backend) -> int:
        """Return the pages that an engine would lend now, as far as the ledger knows."""
        state = backend.state
        return self.ledger.available(EngineId(state.engine_id)) if state is not None else 0

    def describe(self) -> dict[str, Any]:
        """Return the ledger and the swaps, for `GET /admin/ledger`."""
        return {"engines": self.ledger.describe(), "swaps": self._rebalancing.describe()}

    def set_gauges(self, metrics: Metrics) -> None:
        """Set the metrics of the ledger to what they are now."""
        for gauge in (metrics.ledger_available, metrics.ledger_lent, metrics.ledger_borrowed):
            gauge.clear()
        for row in self.ledger.describe():
            metrics.ledger_available.labels(row["engine"]).set(row["available"])
            metrics.ledger_lent.labels(row["engine"]).set(sum(row["lent"].values()))
            metrics.ledger_borrowed.labels(row["engine"]).set(sum(row["borrowed"].values()))

    def close(self) -> None:
        """Tell nobody anything further."""
        self._creditor_lists.close()
        self._rebalancing.close()

    def _cost(self, debtor: EngineId, creditor: EngineId) -> float:
        """Return the ledger's cost of communication: 0 on one host, by their URLs, and 1 otherwise.

        It is infinite for engines that exchange no KV, and for a creditor that takes no new work.
        """
        one, other = self._known.get(debtor), self._known.get(creditor)
        if one is None or other is None or not other.usable or not one.exchanges_with(other):
            return math.inf
        host = _host(one)
        return 0.0 if host and host == _host(other) else 1.0

    def _debtors(self) -> Iterator[Debtor]:
        """Yield the engines that are up and borrow."""
        for backend in self._backends():
            state = backend.state
            if state is not None and state.borrowing is not None and backend.status == "up":
                yield Debtor(
                    EngineId(state.engine_id),
                    state.epoch,
                    state.page_size,
                    partial(_set_creditors, backend),
                    partial(_bring_home, backend),
                )

    def _url_of(self, creditor: EngineId) -> str:
        return backend.url if (backend := self._known.get(creditor)) is not None else ""

    def _debts_changed(self, heartbeat: Heartbeat) -> None:
        self._events.publish(
            "ledger",
            id=heartbeat.instance,
            available=heartbeat.available,
            lent=heartbeat.lent,
            borrowed=heartbeat.borrowed,
        )

    def _swap_begun(self, swap: BlockSwap) -> None:
        self._events.publish("debt_swap", **swap.describe())

    def _swap_ended(self, swap: BlockSwap) -> None:
        self._events.publish("debt_swap", **swap.describe())
        if (metrics := self._metrics) is not None:
            metrics.debt_swaps.labels(swap.outcome).inc()
            metrics.debt_swap_blocks.inc(swap.total)
            for reason, _ in swap.refused.values():
                metrics.debt_swap_refusals.labels(reason).inc()


def _host(backend: Backend) -> str:
    """Return the host of an engine, by its URL; empty if it has none."""
    try:
        return urlsplit(backend.url).hostname or ""
    except ValueError:
        return ""


async def _set_creditors(backend: Backend, wanted: LendCreditors) -> None:
    await backend.client.set_creditors(wanted.model_dump(), NO_HEADERS)


async def _bring_home(backend: Backend, order: LendHome) -> LendHomeReply:
    """Raises `EngineUnreachable` as soon as the engine is down."""
    return await guard(
        backend.client.bring_home(order.model_dump(), NO_HEADERS), backend, endless=True
    )
