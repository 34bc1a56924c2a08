"""A snapshot of a router as it is told: engines, KV that moves, rates, latencies."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from router.api.live.part import Pair, Part
from router.api.parts import Router
from router.base import RevisionNumber
from router.engines import Backend
from router.rollout import Revision
from router.telemetry import WINDOW_S, Sample, Slo, percentile

__all__ = ["Latencies", "snapshot"]

PERCENTS = (50, 90, 99)


def snapshot(
    router: Router, now: Part, before: Part | None, elapsed: float, workers: int
) -> dict[str, Any]:
    """Return what all listeners are told.

    `now` and `before` are of all `workers`, `elapsed` seconds apart.
    """
    return {
        "time": time.time(),
        "window_s": WINDOW_S,
        "workers": workers,
        "engines": [_engine(backend, now) for backend in router.registry],
        "flows": _flows(router, now, before),
        "requests": _requests(now, before, elapsed),
        "active": _revision(router.revisions.active),
        "canary": _canary(router),
    }


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


class Latencies:
    """Percentiles by generation, of the requests that ended in the window.

    They are the same for all listeners, whose objectives decide about goodput only.
    """

    def __init__(self, router: Router, samples: Sequence[Sample]) -> None:
        since = {revision.number: revision.since for revision in router.revisions.live()}
        by_generation: defaultdict[tuple[int, str], list[Sample]] = defaultdict(list)
        for sample in samples:
            by_generation[sample.generation, sample.strategy].append(sample)
        self._told: list[tuple[dict[str, Any], list[Sample]]] = []
        for (generation, strategy), ended in sorted(by_generation.items()):
            done = [sample for sample in ended if sample.done]
            told = {
                "generation": generation,
                "strategy": strategy,
                "since": since.get(RevisionNumber(generation)),
                "requests": len(ended),
                "failed": len(ended) - len(done),
                "ttft_ms": _percentiles([sample.ttft_ms for sample in ended]),
                "tpot_ms": _percentiles([sample.tpot_ms for sample in ended]),
                "jct_ms": _percentiles([sample.jct_ms for sample in ended]),
            }
            self._told.append((told, done))

    def by(self, slo: Slo) -> list[dict[str, Any]]:
        """Return them with the goodput by `slo`."""
        latencies = []
        for told, done in self._told:
            good = sum(_meets(sample, slo) for sample in done)
            goodput = {"goodput": good / told["requests"], "goodput_per_s": good / WINDOW_S}
            latencies.append({**told, **goodput})
        return latencies


def _meets(sample: Sample, slo: Slo) -> bool:
    ttft, tpot = sample.ttft_ms, sample.tpot_ms
    return (slo.ttft_ms is None or ttft is None or ttft <= slo.ttft_ms) and (
        slo.tpot_ms is None or tpot is None or tpot <= slo.tpot_ms
    )


def _percentiles(values: Sequence[float | None]) -> dict[str, float | None]:
    known = sorted([value for value in values if value is not None])
    return {f"p{percent}": percentile(known, percent) for percent in PERCENTS}
