"""The changes of a virtual engine's prefix cache, for those that follow them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from engine.protocol import PageName, PrefixChange, page_name
from engine.virtual.cache import VirtualCache

__all__ = ["VirtualPrefixFeed"]


class VirtualPrefixFeed:
    """The followers of one cache, as `engine.service.prefix_feed` has."""

    def __init__(self, cache: VirtualCache) -> None:
        self._cache = cache
        # A set would have another order in each process.
        self._followers: dict[asyncio.Queue[PrefixChange | None], None] = {}

    async def changes(self) -> AsyncGenerator[PrefixChange, None]:
        """Yield what the prefix cache holds, and then its changes, until `end`."""
        changes: asyncio.Queue[PrefixChange | None] = asyncio.Queue()
        names = self._cache.prefix.follow(page_name, self._changed)
        changes.put_nowait(PrefixChange.model_construct(added=names, removed=[]))
        self._followers[changes] = None
        try:
            while (change := await changes.get()) is not None:
                yield change
        finally:
            self._followers.pop(changes, None)

    def end(self) -> None:
        """Let `changes` end."""
        for changes in self._followers:
            changes.put_nowait(None)

    def _changed(self, added: Sequence[PageName], removed: Sequence[PageName]) -> None:
        change = PrefixChange.model_construct(added=list(added), removed=list(removed))
        for changes in self._followers:
            changes.put_nowait(change)
