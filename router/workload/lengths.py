"""Lengths of prompts and answers, in tokens: endless iterators, and none below one token."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

__all__ = ["drawn", "fixed", "lognormal", "normal", "uniform"]

Seed = int | str


def fixed(tokens: int) -> Iterator[int]:
    """Yield the same length."""
    return itertools.repeat(max(1, tokens))


def uniform(seed: Seed, low: int, high: int) -> Iterator[int]:
    """Yield lengths from `low` to `high`, both included, all equally likely."""
    source = random.Random(seed)
    while True:
        yield max(1, source.randint(low, high))


def normal(seed: Seed, mean: float, sigma: float) -> Iterator[int]:
    """Yield normally distributed lengths; `sigma` is the standard deviation."""
    source = random.Random(seed)
    while True:
        yield max(1, round(source.gauss(mean, sigma)))


def lognormal(seed: Seed, median: float, sigma: float, low: int, high: int) -> Iterator[int]:
    """Yield lengths whose logarithms are normally distributed, clipped to `low` and `high`.

    `sigma` is the standard deviation of the natural logarithm.
    """
    source = random.Random(seed)
    while True:
        yield max(1, min(max(round(median * source.lognormvariate(0, sigma)), low), high))


def drawn(seed: Seed, lengths: Sequence[int]) -> Iterator[int]:
    """Yield lengths of a list, drawn with replacement.

    Two lists of the same number of lengths give pairs of them where the seed is the same.
    """
    source = random.Random(seed)
    while True:
        yield max(1, lengths[source.randrange(len(lengths))])
