"""Serves a store to the worker processes of this one."""

from __future__ import annotations

import msgspec

from router.store.link import Handler, Link
from router.store.linked import CHANGED
from router.store.memory import MemoryStore
from router.store.store import Change, Outcome, Take, Taken

__all__ = ["StoreServer"]


class StoreServer:
    """A `MemoryStore`, and its calls as handlers of links."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self._links: set[Link] = set()
        store.on_change.append(self._changed)

    @property
    def handlers(self) -> dict[str, Handler]:
        """The handlers of the calls that a `LinkedStore` makes."""
        store = self._store
        return {
            "get": store.get,
            "commit": self._commit,
            "source": store.source,
            "append": store.append,
            "log": store.log,
            "report": store.report,
            "take": self._take,
            "announce": store.announce,
            "withdraw": store.withdraw,
            "members": store.members,
        }

    def add(self, link: Link) -> None:
        """Notify the other end of `link` of changes."""
        self._links.add(link)

    def remove(self, link: Link) -> None:
        """Notify it no longer."""
        self._links.discard(link)

    async def _commit(self, change: object) -> Outcome:
        return await self._store.commit(msgspec.convert(change, Change, builtin_types=(bytes,)))

    async def _take(self, takes: object) -> Taken:
        return await self._store.take(msgspec.convert(takes, list[Take]))

    def _changed(self) -> None:
        for link in self._links:
            link.notify(CHANGED)
