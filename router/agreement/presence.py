"""The routers of a store: which are there, and which version of the document each has applied."""

from __future__ import annotations

import asyncio

import msgspec

from router.agreement.decoded import decoded
from router.base import StoreUnavailable
from router.store import SharedStore

__all__ = ["ROUTERS", "SEEN_S", "Presence"]

MEMBER_S = 5.0  # without a sign of life, a router counts as gone
SEEN_S = 2.0  # longest wait for the other routers to run a change
ROUTERS = "routers"  # their kind among the members of a store


class _Said(msgspec.Struct, frozen=True):
    """What a router tells the others: the version that it runs, and whether it cannot load it."""

    version: int
    failed: bool


class Presence:
    """Tells the others of this router, and knows who was there at the latest look."""

    def __init__(self, store: SharedStore, name: str) -> None:
        self._store = store
        self._name = name
        self._others: set[str] = set()
        self._looked = False

    @property
    def count(self) -> int:
        """How many routers there are, this one included."""
        return 1 + len(self._others)

    @property
    def first(self) -> bool:
        """Whether this router is the first of all by name; not before it has looked."""
        return self._looked and all(self._name < other for other in self._others)

    async def announce(self, version: int, *, failed: bool) -> None:
        """Tell which version this router has applied. Raises `StoreUnavailable`."""
        told = msgspec.json.encode(_Said(version, failed))
        await self._store.announce(ROUTERS, self._name, told, MEMBER_S)

    async def look(self) -> None:
        """See who is there. Raises `StoreUnavailable`."""
        self._others = set(await self._store.members(ROUTERS)) - {self._name}
        self._looked = True

    async def withdraw(self) -> None:
        """Tell that this router ends. Raises `StoreUnavailable`."""
        await self._store.withdraw(ROUTERS, self._name)

    async def pending(self, version: int) -> list[str]:
        """Wait until all routers have applied `version`, for `SEEN_S` at most.

        Returns those that have not, or that cannot load it. If the store is lost meanwhile, these
        are all others of which it is not known.
        """
        loop = asyncio.get_running_loop()
        until, seen = loop.time() + SEEN_S, 0
        pending = sorted(self._others)
        try:
            while True:
                members = await self._store.members(ROUTERS)
                read = {id: decoded(value, _Said) for id, value in members.items()}
                said = {id: one for id, one in read.items() if one is not None}
                behind = {id for id, one in said.items() if one.version < version}
                pending = sorted(behind | {id for id, one in said.items() if one.failed})
                if not behind or loop.time() > until:
                    return pending
                seen = await self._store.wait(seen, 0.1)
        except StoreUnavailable:
            return pending
