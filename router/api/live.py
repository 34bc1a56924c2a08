"""Snapshots of a router, one a second, computed while somebody listens and shared by listeners.

activity, queue ──► Part ──┐
other workers'  ──► Part ──┴─► snapshot ──► a frame per set of objectives ──► its listeners
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
import orjson

from engine.protocol import Overloaded
from router.api.parts import Router
from router.base import EngineId, RevisionNumber, StoreUnavailable
from router.engines import Backend
from router.rollout import Revision
from router.telemetry import WINDOW_S, Listener, Receipt, Sample, Slo, percentile

__all__ = ["LiveFeed", "Part", "part_of"]

log = logging.getLogger(__name__)

EVERY_S = 1.0
MOST_LISTENERS = 64
MOST_UNREAD = 8  # snapshots; then a listener is cut off
PERCENTS = (50, 90, 99)
Pair = tuple[str, str]


class Part(msgspec.Struct, array_like=True):
    """What one process knows. Sums count from its start."""

    begun: int
    ended: int
    failed: int
    tokens: int  # emitted, by running requests too
    live: int
    queued: int
    in_flight: dict[str, int]  # requests by engine that they have open calls to
    flows: list[tuple[str, str, int, int]]  # source, target, calls, bytes
    sending: list[tuple[str, str, int]]  # source, target, sends under way
    samples: list[Sample]


def part_of(router: Router) -> Part:
    """Return what this process knows now. Takes time in proportion to the running requests."""
    activity = router.activity
    tokens, in_flight, sending = activity.tokens, Counter[str](), Counter[Pair]()
    running = list(activity.running)
    for receipt in running:
        tokens += receipt.emitted
        in_flight.update(_open_engines(receipt, sending))
    return Part(
        activity.begun,
        activity.ended,
        activity.failed,
        tokens,
        len(running),
        len(router.queue),
        dict(in_flight),
        list(router.metrics.flows),
        [(source, target, count) for (source, target), count in sending.items()],
        activity.samples(),
    )


def _open_engines(receipt: Receipt, sending: Counter[Pair]) -> set[EngineId]:
    """Return the engines with open calls of a request; count its sends."""
    engines: set[EngineId] = set()
    for leg in receipt.legs:
        if leg.ms is None:
            engines.add(leg.engine)
            if leg.call == "remote_send" and leg.to is not None:
                sending[leg.engine, leg.to] += 1
    return engines


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
            parts = [part_of(self._router), *await self._others()]
            now, elapsed = _sum(parts), max(loop.time() - at, 1e-3)
            at = loop.time()
            try:
                self._publish(now, before, elapsed, len(parts))
            except Exception:  # the next snapshot may be well
                log.exception("a snapshot failed")
            before = now
            await asyncio.sleep(max(0.0, at + EVERY_S - loop.time()))

    async def _others(self) -> list[Part]:
        if (peers := self._router.peers) is None:
            return []
        with suppress(StoreUnavailable):
            told = await peers.ask_others("live")
            return msgspec.convert([one for one in told if one is not None], list[Part])
        return []

    def _publish(self, now: Part, before: Part | None, elapsed: float, workers: int) -> None:
        router = self._router
        shared = {
            "time": time.time(),
            "window_s": WINDOW_S,
            "workers": workers,
            "engines": [_engine(backend, now) for backend in router.registry],
            "flows": _flows(router, now, before),
            "requests": _requests(now, before, elapsed),
            "active": _revision(router.revisions.active),
            "canary": _canary(router),
        }
        since = {revision.number: revision.since for revision in router.revisions.live()}
        for slo, listeners in self._listeners.items():
            latency = _latency(now.samples, slo, since)
            told = {**shared, "slo": slo, "latency": latency}
            data = orjson.dumps(told, option=orjson.OPT_NON_STR_KEYS)
            for listener in list(listeners):
                listener.put(b"event: live\ndata: %b\n\n" % data)


def _sum(parts: Sequence[Part]) -> Part:
    if len(parts) == 1:
        return parts[0]
    in_flight, calls, sizes = Counter[str](), Counter[Pair](), Counter[Pair]()
    sending = Counter[Pair]()
    for part in parts:
        in_flight.update(part.in_flight)
        for source, target, count, size in part.flows:
            calls[source, target] += count
            sizes[source, target] += size
        for source, target, count in part.sending:
            sending[source, target] += count
    begun, ended, failed, tokens, live, queued = map(
        sum,
        zip(
            *(
                (one.begun, one.ended, one.failed, one.tokens, one.live, one.queued)
                for one in parts
            ),
            strict=True,
        ),
    )
    return Part(
        begun,
        ended,
        failed,
        tokens,
        live,
        queued,
        dict(in_flight),
        [(*pair, count, sizes[pair]) for pair, count in calls.items()],
        [(*pair, count) for pair, count in sending.items()],
        [sample for part in parts for sample in part.samples],
    )


def _requests(now: Part, before: Part | None, elapsed: float) -> dict[str, Any]:
    """Return counts, and rates since the snapshot before; a worker that ended lowers sums."""

    def rate(name: str) -> float:
        if before is None:
            return 0.0
        change: int = getattr(now, name) - getattr(before, name)
        return max(0.0, change / elapsed)

    return {
        "live": now.live,
        "queued": now.queued,
        "begun_per_s": rate("begun"),
        "ended_per_s": rate("ended"),
        "failed_per_s": rate("failed"),
        "tokens_per_s": rate("tokens"),
    }


def _engine(backend: Backend, now: Part) -> dict[str, Any]:
    state, model = backend.state, backend.model
    heartbeat = state.heartbeat if state is not None else None
    borrowed = dict(heartbeat.borrowed) if heartbeat is not None else {}
    pages = state.pages.model_dump() if state is not None else None
    if pages is not None and state is not None:
        pages["borrowed"] = sum(borrowed.values())
    return {
        "id": backend.id,
        "url": backend.url,
        "role": backend.role,
        "labels": dict(backend.labels),
        "status": backend.status,
        "draining": backend.draining or backend.leaving or (state is not None and state.draining),
        "usable": backend.usable,
        "breaker": backend.breaker.state,
        "problem": backend.last_error or backend.warning or backend.refused_heartbeat or None,
        "epoch": str(state.epoch) if state is not None else None,  # too large for JavaScript
        "model": model.name if model is not None else None,
        "kv": model.fingerprint[:64] if model is not None else None,
        "page_size": model.page_size if model is not None else None,
        "running": state.running if state is not None else 0,
        "waiting": state.waiting if state is not None else 0,
        "leases": len(state.leases) if state is not None else 0,
        "puts_in_flight": state.puts_in_flight if state is not None else 0,
        "pages": pages,
        "borrowed_from": borrowed,  # pages, by the name of the creditor
        "tiers": [tier.model_dump() for tier in state.tiers] if state is not None else [],
        "load": {"tokens": backend.load.tokens, "streams": backend.load.streams},
        "requests": now.in_flight.get(backend.id, 0),
        "replicas": len(backend.replicas),
    }


def _flows(router: Router, now: Part, before: Part | None) -> list[dict[str, Any]]:
    """Return the pairs between which KV moves, or has moved since the snapshot before.

    `mirrors` are generations at the first engine that have a replica at the second one.
    """
    old = {(source, target): (calls, size) for source, target, calls, size in (before or now).flows}
    flows: dict[Pair, dict[str, int]] = {}

    def flow(source: str, target: str) -> dict[str, int]:
        return flows.setdefault(
            (source, target), {"bytes": 0, "calls": 0, "sending": 0, "mirrors": 0}
        )

    for source, target, calls, size in now.flows:
        old_calls, old_size = old.get((source, target), (0, 0))
        if calls > old_calls:
            moved = flow(source, target)
            moved["calls"], moved["bytes"] = calls - old_calls, max(0, size - old_size)
    for source, target, count in now.sending:
        flow(source, target)["sending"] = count
    for backend in router.registry:
        for replica in backend.mirrored:
            flow(backend.id, replica.backend.id)["mirrors"] += 1
    return [{"from": source, "to": target, **moved} for (source, target), moved in flows.items()]


def _revision(revision: Revision) -> dict[str, Any]:
    return {
        "generation": revision.number,
        "strategy": revision.bound.strategy.name,
        "params": revision.bound.shown,
        "since": revision.since,
        "in_flight": revision.in_flight,
    }


def _canary(router: Router) -> dict[str, Any] | None:
    revisions = router.revisions
    if revisions.canary is None or revisions.candidate is None:
        return None
    return {**_revision(revisions.candidate), **revisions.canary.describe()}


def _latency(
    samples: Sequence[Sample], slo: Slo, since: dict[RevisionNumber, float]
) -> list[dict[str, Any]]:
    """Return percentiles and goodput by generation, of the requests that ended in the window."""
    by_generation: defaultdict[tuple[int, str], list[Sample]] = defaultdict(list)
    for sample in samples:
        by_generation[sample.generation, sample.strategy].append(sample)
    told = []
    for (generation, strategy), ended in sorted(by_generation.items()):
        good = sum(_meets(sample, slo) for sample in ended)
        told.append(
            {
                "generation": generation,
                "strategy": strategy,
                "since": since.get(RevisionNumber(generation)),
                "requests": len(ended),
                "failed": sum(not sample.done for sample in ended),
                "ttft_ms": _percentiles([sample.ttft_ms for sample in ended]),
                "tpot_ms": _percentiles([sample.tpot_ms for sample in ended]),
                "jct_ms": _percentiles([sample.jct_ms for sample in ended]),
                "goodput": good / len(ended),
                "goodput_per_s": good / WINDOW_S,
            }
        )
    return told


def _meets(sample: Sample, slo: Slo) -> bool:
    ttft, tpot = sample.ttft_ms, sample.tpot_ms
    return (
        sample.done
        and (slo.ttft_ms is None or ttft is None or ttft <= slo.ttft_ms)
        and (slo.tpot_ms is None or tpot is None or tpot <= slo.tpot_ms)
    )


def _percentiles(values: Sequence[float | None]) -> dict[str, float | None]:
    known = sorted([value for value in values if value is not None])
    return {f"p{percent}": percentile(known, percent) for percent in PERCENTS}
