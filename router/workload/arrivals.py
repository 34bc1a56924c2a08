"""Arrival times of requests, in seconds since the start."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator

__all__ = ["evenly", "gamma", "poisson", "replayed"]


def poisson(seed: int, rate: float) -> Iterator[float]:
    """Yield a Poisson process of `rate` arrivals per second on average."""
    source, at = random.Random(seed), 0.0
    while True:
        at += source.expovariate(rate)
        yield at


def gamma(seed: int, rate: float, cv: float) -> Iterator[float]:
    """Yield `rate` arrivals per second on average, with gamma distributed times between them.

    `cv` is their coefficient of variation, the standard deviation over the mean. 1 is a Poisson
    process; above it, arrivals come in bursts.
    """
    source, at = random.Random(seed), 0.0
    shape = 1 / cv**2
    while True:
        at += source.gammavariate(shape, 1 / (rate * shape))
        yield at


def evenly(rate: float) -> Iterator[float]:
    """Yield an arrival every `1 / rate` seconds."""
    number = 0
    while True:
        yield number / rate
        number += 1


def replayed(times: Iterable[float], speed: float = 1.0) -> Iterator[float]:
    """Yield recorded times, `speed` times as fast; the first one becomes 0."""
    first: float | None = None
    for at in times:
        first = at if first is None else first
        yield (at - first) / speed
