"""`GET /microserving/prefixes`: what the prefix cache has, told to routers as it changes.

    tree ── names that come and go ──► what waits for a reader ── a frame a beat ──► router
            (any thread, under the cache's lock)                  (the event loop)

What waits is the difference between what the reader knows and what is there. So it is never more
than the names of two pools, however slow the reader is, and one frame puts it right again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import orjson
from fastapi import FastAPI

from engine.api.live_response import LiveResponse
from engine.protocol import PageName, page_name
from kvcache.cache import KVCache

__all__ = ["PrefixFeed", "PrefixReader", "add_prefixes"]

BEAT_S = 0.01  # what changes within it is one frame


class PrefixReader:
    """One router's stream, from `PrefixFeed.open` to `close`."""

    def __init__(self, cache: KVCache) -> None:
        self._lock = cache.lock
        self._waiting: dict[PageName, bool] = {}  # is it there now; under the lock
        self._wake = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._ended = False

    def note(self, added: Sequence[PageName], removed: Sequence[PageName]) -> None:
        """Have it told that pages have come and gone. Call it under the cache's lock."""
        idle = not self._waiting
        for names, there in ((added, True), (removed, False)):
            for name in names:
                if self._waiting.get(name, there) is there:
                    self._waiting[name] = there
                else:
                    del self._waiting[name]  # it is as the reader knows it
        if idle and self._waiting:
            self._loop.call_soon_threadsafe(self._wake.set)

    def end(self) -> None:
        """Let `frames` end."""
        self._ended = True
        self._wake.set()

    async def frames(self) -> AsyncIterator[bytes]:
        """`PrefixChange`s, a line each, for as long as somebody reads; the first one at once."""
        yield self._frame()
        while True:
            await self._wake.wait()
            if self._ended:
                return
            await asyncio.sleep(BEAT_S)
            if self._waiting:
                yield self._frame()
            else:
                self._wake.clear()

    def _frame(self) -> bytes:
        with self._lock:
            waiting, self._waiting = self._waiting, {}
            self._wake.clear()
        added = [name for name, there in waiting.items() if there]
        removed = [name for name, there in waiting.items() if not there]
        return orjson.dumps({"added": added, "removed": removed}) + b"\n"


class PrefixFeed:
    """All readers of one cache."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._readers: set[PrefixReader] = set()

    def open(self) -> PrefixReader:
        """A reader that begins with what there is now. Call it on the event loop that serves it."""
        reader = PrefixReader(self._cache)
        with self._cache.lock:
            reader.note(self._cache.follow_prefixes(page_name, self._tell), ())
            self._readers.add(reader)
        return reader

    def close(self, reader: PrefixReader) -> None:
        """Nobody reads it any more. Idempotent."""
        with self._cache.lock:
            self._readers.discard(reader)

    def end(self) -> None:
        """Let all streams end: the process is about to exit."""
        with self._cache.lock:
            for reader in self._readers:
                reader.end()
            self._readers.clear()

    def _tell(self, added: Sequence[PageName], removed: Sequence[PageName]) -> None:
        for reader in self._readers:
            reader.note(added, removed)


def add_prefixes(app: FastAPI, feed: PrefixFeed) -> None:
    """Let routers follow the prefix cache at `app`."""

    @app.get("/microserving/prefixes", response_class=LiveResponse)
    async def prefixes() -> LiveResponse:
        """What the prefix cache has, and from then on what it gains and loses.

        A frame is a line, `{"added": [NAME, …], "removed": [NAME, …]}`; the first has all.
        """
        reader = feed.open()
        return LiveResponse(reader.frames(), lambda: feed.close(reader), "application/x-ndjson")
