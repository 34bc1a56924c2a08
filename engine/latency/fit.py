"""Fits the coefficients of `FittedLatency` to measured steps.

Least squares on the relative error, as DistServe does: a step of 20 ms counts as much as one of
two seconds. Coefficients are not negative. A fit that would have one below zero is made again
without that term.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations
from statistics import median
from typing import Annotated, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from pydantic.dataclasses import dataclass

from engine.latency.step import STRICT, Amount, Coefficients, FittedLatency, StepWork
from engine.protocol import BadRequest

__all__ = ["Fit", "Measured", "Residuals", "fit_latency", "residuals"]

Matrix = NDArray[np.float64]
TERMS = 3


class Measured(NamedTuple):
    """A step and the time that it took."""

    work: StepWork
    seconds: float


@dataclass(frozen=True, slots=True, config=STRICT)
class Residuals:
    """How far a model is from the measured points: |model - measured| / measured."""

    points: Annotated[int, Field(ge=0)]
    median: Amount
    largest: Amount


@dataclass(frozen=True, slots=True, config=STRICT)
class Fit:
    """The residuals of a profile's steps with prompts and of those with decodes."""

    prefill: Residuals
    decode: Residuals


def fit_latency(
    measured: Sequence[Measured], *, large_batch: int | None = None
) -> tuple[FittedLatency, Fit]:
    """Fit `FittedLatency` to steps that compute either prompts or decodes.

    Decodes from `large_batch` on get coefficients of their own. Without it, all have the same.

    Raises: `BadRequest` for a step with both or neither, for a time that is not positive, and if
    the steps do not differ enough to tell the coefficients apart.
    """
    for work, seconds in measured:
        if bool(work.prompt_tokens) == bool(work.decodes):
            raise BadRequest(f"a step to fit has either prompts or decodes, not {work}")
        if not 0 < seconds < float("inf"):
            raise BadRequest(f"a measured step took {seconds} s, which is no positive time")
    prompts = [step for step in measured if step.work.prompt_tokens]
    decodes = [step for step in measured if step.work.decodes]
    prefill = _fit("prefill", ((1, w.prompt_tokens, w.prompt_squares) for w, _ in prompts), prompts)
    small = [step for step in decodes if not large_batch or step.work.decodes < large_batch]
    large = [step for step in decodes if large_batch and step.work.decodes >= large_batch]
    decode = _fit("decode", ((1, w.context, w.decodes) for w, _ in small), small)
    large_decode = decode
    if large_batch:
        name = f"decode of {large_batch} sequences and more"
        large_decode = _fit(name, ((1, w.context, w.decodes) for w, _ in large), large)
    model = FittedLatency(prefill, decode, large_decode, large_batch or 1)
    return model, Fit(residuals(model, prompts), residuals(model, decodes))


def residuals(model: FittedLatency, measured: Sequence[Measured]) -> Residuals:
    """Return how far the model is from the measured steps."""
    errors = [abs(model.seconds(work) - seconds) / seconds for work, seconds in measured]
    return Residuals(len(errors), median(errors), max(errors))


def _fit(
    name: str, rows: Iterable[tuple[int, int, int]], measured: Sequence[Measured]
) -> Coefficients:
    terms = np.array(list(rows), dtype=np.float64).reshape(-1, TERMS)
    times = np.array([seconds * 1e3 for _, seconds in measured])
    scale = np.abs(terms).max(axis=0, initial=0.0)
    if not scale.all() or np.linalg.matrix_rank(terms / scale) < TERMS:
        raise BadRequest(
            f"{name}: {len(times)} measured steps do not tell {TERMS} coefficients apart; "
            "measure more different ones"
        )
    # Divided by its time, each row aims at 1. Columns of like size keep the solution exact.
    a, b, c = _non_negative(terms / scale / times[:, None]) / scale
    return (float(a), float(b), float(c))


def _non_negative(rows: Matrix) -> Matrix:
    """Return x >= 0 that minimises |rows·x - 1|².

    At the minimum, the positive elements solve the problem without the others. With few columns,
    trying all sets of them is simplest.
    """
    count = rows.shape[1]
    best, least = np.zeros(count), float("inf")
    for size in range(1, count + 1):
        for columns in map(list, combinations(range(count), size)):
            solved = np.linalg.lstsq(rows[:, columns], np.ones(len(rows)), rcond=None)[0]
            error = float(np.square(rows[:, columns] @ solved - 1).sum())
            if solved.min() >= 0 and error < least:
                best, least = np.zeros(count), error
                best[columns] = solved
    return best
