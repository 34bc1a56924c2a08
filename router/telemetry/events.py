"""Events in the router, published to listeners as server-sent events for dashboards."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import orjson

from engine.protocol import Overloaded

__all__ = ["EventKind", "Events", "Listener"]

EventKind = Literal[
    "swap",  # another generation became active
    "canary",  # begun, promoted or rolled back
    "load",  # a strategy was loaded
    "offence",  # a strategy broke a rule
    "engine",  # up or down
    "host",  # this process did not run for a while
    "migration",  # an admin moved a prefix
    "ledger",  # what an engine has lent or borrowed
    "debt_swap",  # blocks begin to come home around a cycle of debts, or have done so
    "pin",  # the state or the copies of a pinned prefix
    "request_begun",
    "request_ended",
]
QUEUE = 1024
MOST_LISTENERS = 64  # to everything: each may have a full queue, and takes a connection


class Listener:
    """One listener's bounded queue of encoded events. A listener that falls behind is cut off."""

    def __init__(self, limit: int, cut_off: Callable[[], object]) -> None:
        self._limit = limit
        self._cut_off = cut_off
        self._frames: deque[bytes] = deque()
        self._ready = asyncio.Event()
        self._over = False

    def put(self, frame: bytes) -> None:
        if self._over:
            return
        if len(self._frames) >= self._limit:
            self._frames.clear()
            self.end()
            self._cut_off()
        else:
            self._frames.append(frame)
            self._ready.set()

    def end(self) -> None:
        """Take no more events; those in the queue are still delivered."""
        self._over = True
        self._ready.set()

    async def frames(self, idle_s: float) -> AsyncIterator[bytes]:
        """Yield the queued events, joined, until the end; b"" if none came for `idle_s` seconds."""
        while not self._over or self._frames:
            try:
                async with asyncio.timeout(idle_s):
                    await self._ready.wait()
            except TimeoutError:
                yield b""
                continue
            self._ready.clear()
            together = b"".join(self._frames)
            self._frames.clear()
            if together:
                yield together


class Events:
    """Publishes events. Costs nothing without listeners, and never waits."""

    def __init__(self, limit: int = QUEUE) -> None:
        self._limit = limit
        self._listeners: set[Listener] = set()
        self._private: set[Listener] = set()
        self._closed = False
        self._numbers = itertools.count(1)

    def publish(self, event: EventKind, /, **fields: Any) -> None:
        if not self._listeners:
            return
        data = orjson.dumps({"at": time.time(), **fields}, option=orjson.OPT_NON_STR_KEYS)
        frame = b"id: %d\nevent: %b\ndata: %b\n\n" % (next(self._numbers), event.encode(), data)
        for listener in self._listeners:
            listener.put(frame)

    @contextmanager
    def listening(self, cut_off: Callable[[], object]) -> Iterator[Listener]:
        """A listener to all events published while the body runs.

        `cut_off` is called if the listener does not keep up. Raises `Overloaded` for too many
        listeners.
        """
        if len(self._listeners) >= MOST_LISTENERS:
            raise Overloaded(f"{MOST_LISTENERS} listeners are connected; more are not served")
        listener = Listener(self._limit, cut_off)
        self._listeners.add(listener)
        try:
            yield listener
        finally:
            self._listeners.discard(listener)

    @contextmanager
    def private(self, cut_off: Callable[[], object], limit: int) -> Iterator[Listener]:
        """A listener that gets only what its holder puts; else as `listening`."""
        listener = Listener(limit, cut_off)
        self._private.add(listener)
        if self._closed:
            listener.end()
        try:
            yield listener
        finally:
            self._private.discard(listener)

    def close(self) -> None:
        """End all listeners, private ones too."""
        self._closed = True
        for listener in self._listeners | self._private:
            listener.end()
