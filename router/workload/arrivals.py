"""Arrival times of requests, in seconds since the start."""

from __future__ import annotations

import random
from collections.abc import Iterator

__all__ = ["evenly", "poisson"]


def poisson(seed: int, rate: float) -> Iterator[float]:
    """Yield a Poisson process of `rate` arrivals per second on average."""
    source, at = random.Random(seed), 0.0
    while True:
        at += source.expovariate(rate)
        yield at


def evenly(rate: float) -> Iterator[float]:
    """Yield an arrival every `1 / rate` seconds."""
    number = 0
    while True:
        yield number / rate
        number += 1
