"""Engines that one router of a store knows become known to all of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress

import msgspec
from msgspec import Struct

from engine.protocol import MicroserveError
from router.agreement.decoded import decoded
from router.base import StoreUnavailable
from router.engines import Backend, Registry, Role, engine_url
from router.store import SharedStore

__all__ = ["Membership"]

log = logging.getLogger(__name__)

ROUND_S = 2.0  # between two rounds without a notice
MEMBER_S = 15.0  # an engine that no router announces for so long is no member
LEFT_S = 60.0  # an engine that left a router's file is not learned from the others for so long
ORDER_S = 7 * 86400.0
ENGINES, LEFT, ORDERS = "engines", "left", "orders"
MOST = 4096  # engines, and orders


class Member(Struct, frozen=True, omit_defaults=True):
    """What a router that was told of an engine tells the others."""

    role: Role | None = None
    labels: dict[str, str] | None = None


class Order(Struct, frozen=True):
    """What administrators have last ordered for an engine. Numbers of an engine's orders grow."""

    number: int = 0
    removed: bool = False
    draining: bool = False
    role: Role | None = None
    labels: dict[str, str] | None = None


class Membership:
    """Announces the engines that this router was told of, and adds those that others announce.

    An engine that was learned from the store is forgotten once it is down and no router announces
    it; while the store is lost, after `forget_s`, as one that sends heartbeats. One that is up
    stays, since whoever announced it may have died. But where the file of a router has dropped it,
    the others drain and forget it too, unless they were told of it themselves. Orders of
    administrators (drain, remove, role, labels) are carried out by all routers. While the store is
    lost they are carried out here; the others follow when it is back.
    """

    def __init__(self, registry: Registry, store: SharedStore) -> None:
        self._registry = registry
        self._store = store
        self._orders: dict[str, Order] = {}  # by URL, as carried out here
        self._announced: set[str] = set()  # engines, as the store was told
        self._listed: set[str] = set()  # those of them that the file of this router names
        self._told = asyncio.Event()

    async def run(self) -> None:
        """Exchange members and orders with the store until cancelled."""
        seen = 0
        while True:
            try:
                await self.exchange()
            except StoreUnavailable:
                log.debug("the store is lost: the engines stay as they are")
            except Exception:
                log.exception("the engines of the store cannot be followed")
            seen = await self._store.wait(seen, ROUND_S)

    async def exchange(self) -> None:
        """Exchange them once. Raises `StoreUnavailable`."""
        await self._follow_orders()
        own = {backend.url: backend for backend in self._registry if backend.source != "store"}
        # Each router discovers for itself, so that an engine that terminates is gone at once.
        told = {
            url: backend
            for url, backend in own.items()
            if not backend.leaving and backend.source != "discovery"
        }
        await self._tell_left(told)
        for url, backend in told.items():
            value = msgspec.json.encode(_member(backend))
            await self._store.announce(ENGINES, url, value, MEMBER_S)
        members = await self._store.members(ENGINES)
        left = await self._store.members(LEFT)
        for url, value in list(members.items())[:MOST]:
            ended = url in left or self._orders.get(url, Order()).removed
            if url not in own and not ended:
                self._add(url, value)
        for backend in list(self._registry):
            gone = backend.source == "store" and backend.url not in members
            if gone and (backend.status == "down" or backend.url in left):
                self._registry.remove(backend)

    async def _tell_left(self, told: Mapping[str, Backend]) -> None:
        """Tell the others which engines the file of this router has dropped, and which are back."""
        for url in self._listed - told.keys():
            await self._store.withdraw(ENGINES, url)
            await self._store.announce(LEFT, url, b"", LEFT_S)
        for url in told.keys() - self._announced:
            await self._store.withdraw(LEFT, url)
        self._announced = set(told)
        self._listed = {url for url, backend in told.items() if backend.source == "file"}

    async def announce(self) -> None:
        """Tell the others at once of an engine that has registered here, if the store answers."""
        try:
            await self.exchange()
        except StoreUnavailable:
            log.debug("the store is lost: the other routers learn of the engine later")

    async def order(
        self,
        url: str,
        *,
        removed: bool = False,
        draining: bool | None = None,
        role: Role | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        """Tell the others what an administrator has ordered and this router has done.

        `None`: as before.
        """
        with suppress(StoreUnavailable):  # later orders of others come before this one
            await self._follow_orders()
        old = self._orders.get(url, Order())
        if old.removed:
            old = Order(old.number)  # it comes back as a new engine
        if len(self._orders) >= MOST and url not in self._orders:
            del self._orders[next(iter(self._orders))]
        self._orders[url] = Order(
            old.number + 1,
            removed,
            old.draining if draining is None else draining,
            old.role if role is None else role,
            old.labels if labels is None else dict(labels),
        )
        if not removed:
            self._carry_out(url, self._orders[url])
        try:
            await self.exchange()
        except StoreUnavailable:
            log.warning("the store is lost: the other routers do not know of the order yet")

    async def ended(self, url: str, *, for_good: bool) -> None:
        """Tell the others that an engine is gone: by an administrator's order, or by itself."""
        try:
            await self._store.withdraw(ENGINES, url)
        except StoreUnavailable:
            log.info("the store is lost: the other routers notice later that an engine is gone")
        if for_good:
            await self.order(url, removed=True)

    async def _follow_orders(self) -> None:
        found = await self._store.members(ORDERS)
        orders = {url: decoded(value, Order) for url, value in list(found.items())[:MOST]}
        for url, order in orders.items():
            known = self._orders.get(url, Order())
            if order is None or order == known:
                continue
            # Of two orders at the same time, the one that the store has counts.
            if order.number >= known.number:
                self._orders[url] = order
                self._carry_out(url, order)
        for url, known in list(self._orders.items()):
            if (order := orders.get(url)) is None or order.number < known.number:
                await self._store.announce(ORDERS, url, msgspec.json.encode(known), ORDER_S)

    def _carry_out(self, url: str, order: Order) -> None:
        backend = next((one for one in self._registry if one.url == url), None)
        if backend is None:
            return
        if order.removed:
            self._registry.remove(backend, for_good=True)
            return
        if order.role is not None:
            backend.role, backend.role_pinned = order.role, True
        if order.labels is not None:
            backend.labels, backend.labels_from = order.labels, "admin"
        if order.draining != backend.draining:
            self._registry.drain(backend, order.draining)

    def _add(self, url: str, value: bytes) -> None:
        member = decoded(value, Member)
        try:
            good = engine_url(url)
        except MicroserveError:
            good = ""
        if member is None or good != url:
            log.warning("the store names an engine that is none: %.100s", url)
            return
        new = all(backend.url != url for backend in self._registry)
        self._registry.add(url, role=member.role, labels=member.labels, source="store")
        if new and (order := self._orders.get(url)) is not None:
            self._carry_out(url, order)


def _member(backend: Backend) -> Member:
    labels = dict(backend.labels) if backend.labels_from is not None else None
    return Member(backend.role if backend.role_pinned else None, labels)
