"""What one process knows of the requests: its part of a snapshot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from router.api.parts import Router
from router.base import EngineId
from router.telemetry import Receipt, Sample

__all__ = ["Pair", "Part", "part_of", "summed"]

Pair = tuple[str, str]  # ids of engines: from, to


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


def summed(parts: Sequence[Part]) -> Part:
    """Return what several processes know together."""
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
