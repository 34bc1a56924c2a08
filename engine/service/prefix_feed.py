"""The prefix feed: page names of the prefix cache, streamed to routers as they change.

    cache ── names added, removed ──► pending changes per reader ── frames, paced ──► router
             (any thread, under the cache's lock)                   (the event loop)

The pending changes are the difference between what the reader has received and what the cache
holds. They never exceed the names of two pools, however slow the reader is, and one frame brings
the reader up to date.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import orjson

from engine.protocol import PageName, page_name
from kvcache.cache import KVCache

__all__ = ["PrefixFeed", "PrefixReader"]

FRAME_INTERVAL_S = 0.01  # changes within it share a frame


class PrefixReader:
    """One router's stream, from `PrefixFeed.open` to `close`."""

    def __init__(self, cache: KVCache) -> None:
        self._lock = cache.lock
        self._pending: dict[PageName, bool] = {}  # whether the page is cached; under the lock
        self._wake = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._ended = False

    def record(self, added: Sequence[PageName], removed: Sequence[PageName]) -> None:
        """Add changes for the next frame. The caller holds the cache's lock."""
        idle = not self._pending
        for names, cached in ((added, True), (removed, False)):
            for name in names:
                if self._pending.get(name, cached) is cached:
                    self._pending[name] = cached
                else:
                    del self._pending[name]  # undoes a change that the reader has not seen
        if idle and self._pending:
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
            if self._pending:
                yield self._frame()
            else:
                self._wake.clear()

    def _frame(self) -> bytes:
        with self._lock:
            pending, self._pending = self._pending, {}
            self._wake.clear()
        added = [name for name, cached in pending.items() if cached]
        removed = [name for name, cached in pending.items() if not cached]
        return orjson.dumps({"added": added, "removed": removed}) + b"\n"


class PrefixFeed:
    """The readers of one cache."""

    def __init__(self, cache: KVCache) -> None:
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
