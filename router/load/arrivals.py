"""When requests come: seconds since the start, one after another."""

from __future__ import annotations

import random
from collections.abc import Iterator

__all__ = ["evenly", "poisson"]


def poisson(seed: int, rate: float) -> Iterator[float]:
    """As many independent people would: `rate` a second on average."""
    source, at = random.Random(seed), 0.0
    while True:
        at += source.expovariate(rate)
        yield at


def evenly(rate: float) -> Iterator[float]:
    """One each `1 / rate` seconds."""
    number = 0
    while True:
        yield number / rate
        number += 1
