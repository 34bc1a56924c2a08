"""The prefix feed: page names of the prefix cache, streamed to routers as they change.

    cache ── names added, removed ──► pending changes per reader ── frames, paced ──► router
             (any thread, under the cache's lock)                   (the event loop)

The pending changes are the difference between what the reader has received and what the cache
holds. They never exceed the names of two pools, however slow the reader is.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager
from itertools import islice
from typing import Any, Protocol

import orjson

from engine.protocol import page_name
from kvcache.types import PageName

__all__ = ["FollowedCache", "PrefixFeed", "PrefixReader"]

FRAME_INTERVAL_S = 0.01  # changes within it share a frame
MOST_NAMES = 8192  # of a frame, so that no reader parses for long; routers refuse twice as many


class FollowedCache(Protocol):
    """A prefix cache whose changes can be followed. `KVCache` implements it."""

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """Guards the names; held while changes are reported."""
        ...

    def follow_prefixes(
        self,
        name: Callable[[PageName, bytes], PageName],
        changed: Callable[[Sequence[PageName], Sequence[PageName]], None],
    ) -> Sequence[PageName]:
        """Return the names of all cached pages, and report changes from now on."""
        ...


class PrefixReader:
    """One router's stream, from `PrefixFeed.open` to `close`."""

    def __init__(self, cache: FollowedCache) -> None:
        self._lock = cache.lock
        # What the reader does not know yet, in order; under the lock.
        self._added: dict[PageName, None] = {}
        self._removed: dict[PageName, None] = {}
        self._wake = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._ended = False

    def record(self, added: Sequence[PageName], removed: Sequence[PageName]) -> None:
        """Add changes for the next frame. The caller holds the cache's lock."""
        idle = not self._behind
        for names, changes, undone in (
            (added, self._added, self._removed),
            (removed, self._removed, self._added),
        ):
            for name in names:
                if name in undone:  # by this: the reader has not seen that change
                    del undone[name]
                else:
                    changes[name] = None
        if idle and self._behind:
            self._loop.call_soon_threadsafe(self._wake.set)

    def end(self) -> None:
        """Let `frames` end."""
        self._ended = True
        self._wake.set()

    async def frames(self) -> AsyncIterator[bytes]:
        """Yield `PrefixChange`s, one JSON line each, the first one at once. Ends after `end`."""
        yield self._frame()
        while True:
            await self._wake.wait()
            if self._ended:
                return
            await asyncio.sleep(FRAME_INTERVAL_S)
            if self._behind:
                yield self._frame()
            else:
                self._wake.clear()

    @property
    def _behind(self) -> bool:
        return bool(self._added or self._removed)

    def _frame(self) -> bytes:
        """Return the next changes. Removed pages come first: the reader has a limit, too."""
        with self._lock:
            removed = _taken(self._removed, MOST_NAMES)
            added = _taken(self._added, MOST_NAMES - len(removed))
            if not (more := self._behind):
                self._wake.clear()
        change = {"added": added, "removed": removed}
        return orjson.dumps({**change, "more": True} if more else change) + b"\n"


def _taken(names: dict[PageName, None], most: int) -> list[PageName]:
    """Remove the first names, and return them."""
    taken = list(islice(names, most))
    if len(taken) == len(names):
        names.clear()
    else:
        for name in taken:
            del names[name]
    return taken


class PrefixFeed:
    """The readers of one cache."""

    def __init__(self, cache: FollowedCache) -> None:
        self._cache = cache
        self._readers: set[PrefixReader] = set()

    def open(self) -> PrefixReader:
        """Open a reader that starts with the current pages. Call it on the loop that serves it."""
        reader = PrefixReader(self._cache)
        with self._cache.lock:
            reader.record(self._cache.follow_prefixes(page_name, self._changed), ())
            self._readers.add(reader)
        return reader

    def close(self, reader: PrefixReader) -> None:
        """Close a reader. Idempotent."""
        with self._cache.lock:
            self._readers.discard(reader)

    def end(self) -> None:
        """End all streams, before the process exits."""
        with self._cache.lock:
            for reader in self._readers:
                reader.end()
            self._readers.clear()

    def _changed(self, added: Sequence[PageName], removed: Sequence[PageName]) -> None:
        for reader in self._readers:
            reader.record(added, removed)
