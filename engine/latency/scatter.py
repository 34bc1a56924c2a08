"""How real steps scatter around a model: some take longer than it says, others shorter.

A mean alone makes queues too short: what waits behind a long step waits longer than short steps
give back.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated

import numpy as np
from pydantic import Field

from engine.latency.fit import Measured
from engine.latency.step import StepLatency

__all__ = ["Factors", "Scatter", "scatter_of"]

MOST = 256  # factors that a profile keeps
DRAWN = 4096  # factors until they repeat

# Measured over modelled time of steps, ascending: each is as likely as the next. Empty: none known.
Factor = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Scatter = Annotated[tuple[Factor, ...], Field(max_length=MOST)]


def scatter_of(model: StepLatency, measured: Sequence[Measured]) -> tuple[float, ...]:
    """Return the factors of measured steps: at most `MOST` quantiles, evenly spaced."""
    ratios = [seconds / expected for work, seconds in measured if (expected := model.seconds(work))]
    if not ratios:
        return ()
    count = min(MOST, len(ratios))
    shares = (np.arange(count) + 0.5) / count
    return tuple(round(float(factor), 4) for factor in np.quantile(ratios, shares))


class Factors:
    """The factors of one engine's steps, drawn from a scatter, in order; then the same again.

    The sum over steps in a row costs the same for any number of them up to `longest`.
    """

    __slots__ = ("_drawn", "_number", "_sums", "_weighted")

    def __init__(self, scatter: tuple[float, ...], longest: int) -> None:
        """The module `random` says with which factor the engine begins: its seed decides."""
        self._drawn, self._sums, self._weighted = _draw(scatter, longest)
        self._number = random.randrange(DRAWN)  # of the next step

    def next(self, steps: int) -> list[float]:
        """Return the factors of the next steps."""
        return list(self._drawn[self._number : self._number + steps])

    def seconds(self, first_s: float, growth_s: float, steps: int) -> float:
        """Return how long the next steps take, for the i-th of which the model gives
        `first_s + i * growth_s`.
        """
        begin, end = self._number, self._number + steps
        factors = self._sums[end] - self._sums[begin]
        weighted = self._weighted[end] - self._weighted[begin]
        return first_s * factors + growth_s * (weighted - begin * factors)

    def pass_over(self, steps: int) -> None:
        """The next steps have ended."""
        self._number = (self._number + steps) % DRAWN


@lru_cache(maxsize=64)
def _draw(scatter: tuple[float, ...], longest: int) -> tuple[list[float], list[float], list[float]]:
    """Return drawn factors f, the sums of f(j) over all j < i, and those of j * f(j)."""
    drawn = random.Random("factors").choices(scatter, k=DRAWN)
    drawn += itertools.islice(itertools.cycle(drawn[:]), longest)
    sums = [0.0, *itertools.accumulate(drawn)]
    weighted = [0.0, *itertools.accumulate(number * factor for number, factor in enumerate(drawn))]
    return drawn, sums, weighted
