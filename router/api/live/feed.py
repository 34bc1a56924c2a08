"""Makes snapshots while somebody listens, and gives them to all listeners."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import msgspec
import orjson

from engine.protocol import Overloaded
from router.api.live.part import Part, part_of, summed
from router.api.live.snapshot import Latencies, snapshot
from router.api.parts import Router
from router.base import StoreUnavailable
from router.telemetry import Listener, Slo

__all__ = ["LiveFeed"]

log = logging.getLogger(__name__)

EVERY_S = 1.0
LEAST_S = 0.001  # between two snapshots
MOST_LISTENERS = 64
MOST_UNREAD = 8  # snapshots; then a listener is cut off


class LiveFeed:
    """Makes a snapshot every second while there are listeners. Costs nothing without any."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._listeners: defaultdict[Slo, set[Listener]] = defaultdict(set)
        self._task: asyncio.Task[None] | None = None

    @contextmanager
    def listening(self, slo: Slo, cut_off: Callable[[], object]) -> Iterator[Listener]:
        """A listener to snapshots with goodput by `slo`, while the body runs.

        `cut_off` is called if it does not keep up. Raises `Overloaded` for too many listeners.
        """
        if sum(map(len, self._listeners.values())) >= MOST_LISTENERS:
            raise Overloaded(f"{MOST_LISTENERS} listeners are connected; more are not served")
        with self._router.events.private(cut_off, MOST_UNREAD) as listener:
            self._listeners[slo].add(listener)
            if self._task is None:
                self._task = asyncio.create_task(self._run(), name="live snapshots")
            try:
                yield listener
            finally:
                self._listeners[slo].discard(listener)
                if not self._listeners[slo]:
                    del self._listeners[slo]
                if not self._listeners and self._task is not None:
                    self._task.cancel()
                    self._task = None

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        before: Part | None = None
        at = loop.time()
        while True:
            began = loop.time()
            try:
                parts = [part_of(self._router), *await self._others()]
                now, elapsed = summed(parts), max(loop.time() - at, LEAST_S)
                at = loop.time()
                await self._publish(now, before, elapsed, len(parts))
                before = now
            except Exception:  # the next snapshot may be well
                log.exception("a snapshot failed")
            await asyncio.sleep(max(LEAST_S, began + EVERY_S - loop.time()))

    async def _others(self) -> list[Part]:
        if (peers := self._router.peers) is None:
            return []
        with suppress(StoreUnavailable):
            told = await peers.ask_others("live")
            return msgspec.convert([one for one in told if one is not None], list[Part])
        return []

    async def _publish(self, now: Part, before: Part | None, elapsed: float, workers: int) -> None:
        shared = _json(snapshot(self._router, now, before, elapsed, workers))
        latencies = Latencies(self._router, now.samples)
        for slo in list(self._listeners):
            told = _json({"slo": slo, "latency": latencies.by(slo)})
            frame = b"event: live\ndata: %b,%b\n\n" % (shared[:-1], told[1:])
            for listener in list(self._listeners.get(slo, ())):
                listener.put(frame)
            await asyncio.sleep(0)  # requests have their turn, however many objectives there are


def _json(value: object) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS)
