"""Fits the coefficients of `FittedLatency` to measured steps, and says how far it is from them.

Least squares on the relative error, as DistServe does: a step of 20 ms counts as much as one of
two seconds. Coefficients are not negative. A fit that would have one below zero is made again
without that term.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from statistics import median
from typing import Annotated, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from pydantic.dataclasses import dataclass

from engine.latency.put import PutLatency
from engine.latency.step import (
    STRICT,
    Amount,
    Coefficients,
    FittedLatency,
    StepLatency,
    StepWork,
)
from engine.protocol import BadRequest

__all__ = [
    "Fit",
    "Matrix",
    "Measured",
    "Residuals",
    "divide",
    "doubt",
    "fit_decodes",
    "fit_latency",
    "fit_put",
    "residuals",
]

Matrix = NDArray[np.float64]
TERMS = 3
# Twice the smallest gain that an advice acts on. The shipped profiles are 3 % off at most.
MEDIAN_LIMIT = 0.1


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


def doubt(fit: Fit) -> str:
    """Return a sentence if half of the prompts or decodes are off by more than `MEDIAN_LIMIT`.

    It is empty for a good fit.
    """
    found = [
        f"half of the {what} are more than {of.median:.0%} off (up to {of.largest:.0%})"
        for what, of in (("prompts", fit.prefill), ("decodes", fit.decode))
        if of.median > MEDIAN_LIMIT
    ]
    if not found:
        return ""
    return (
        f"the latency model fits badly: {' and '.join(found)}, where at most {MEDIAN_LIMIT:.0%} is "
        "good; do not rely on differences of this size between strategies"
    )


def fit_latency(
    measured: Sequence[Measured], *, large_batch: int | None = None
) -> tuple[FittedLatency, Fit]:
    """Fit `FittedLatency` to steps that compute either prompts or decodes.

    Decodes from `large_batch` on get coefficients of their own. Without it, all have the same.

    Raises: `BadRequest` for a step with both or neither, for a time that is not positive, and if
    the steps do not differ enough to tell the coefficients apart.
    """
    prompts, decodes = divide(measured)
    rows = [(1, work.prompt_tokens, work.prompt_squares) for work, _ in prompts]
    prefill = _fit("prefill", rows, prompts)
    small = [step for step in decodes if not large_batch or step.work.decodes < large_batch]
    large = [step for step in decodes if large_batch and step.work.decodes >= large_batch]
    decode = large_decode = fit_decodes("decode", small)
    if large_batch:
        large_decode = fit_decodes(f"decode of {large_batch} sequences and more", large)
    model = FittedLatency(prefill, decode, large_decode, large_batch or 1)
    return model, Fit(residuals(model, prompts), residuals(model, decodes))


def fit_put(puts: Sequence[tuple[int, float]], layers: int) -> PutLatency:
    """Fit the time of puts of all layers, in seconds, to their bytes.

    Raises: `BadRequest` without a put.
    """
    if not puts:
        raise BadRequest("no put was measured")
    terms = np.array([(layers / seconds, size / seconds) for size, seconds in puts])
    (layer_s, byte_s), *_ = np.linalg.lstsq(terms, np.ones(len(puts)), rcond=None)
    if layer_s < 0 or byte_s <= 0:  # the time per layer is lost in the noise
        layer_s, byte_s = 0.0, median(seconds / size for size, seconds in puts)
    return PutLatency(bandwidth=float(1 / byte_s), layer_s=float(layer_s))


def residuals(model: StepLatency, measured: Sequence[Measured]) -> Residuals:
    """Return how far the model is from the measured steps."""
    errors = [abs(model.seconds(work) - seconds) / seconds for work, seconds in measured]
    return Residuals(len(errors), median(errors), max(errors))


def divide(measured: Sequence[Measured]) -> tuple[list[Measured], list[Measured]]:
    """Return the steps with prompts and those with decodes.

    Raises: `BadRequest` for a step with both or neither, and for a time that is not positive.
    """
    for work, seconds in measured:
        if bool(work.prompt_tokens) == bool(work.decodes):
            raise BadRequest(f"a step to fit has either prompts or decodes, not {work}")
        if not 0 < seconds < float("inf"):
            raise BadRequest(f"a measured step took {seconds} s, which is no positive time")
    prompts = [step for step in measured if step.work.prompt_tokens]
    return prompts, [step for step in measured if step.work.decodes]


def _fit(
    name: str, rows: Sequence[tuple[int, int, int]], measured: Sequence[Measured]
) -> Coefficients:
    """Return the coefficients, in milliseconds, of the terms in `rows`, one row for each step.

    Raises: `BadRequest`, which begins with `name`, if the rows do not tell them apart.
    """
    terms = np.array(rows, dtype=np.float64).reshape(-1, TERMS)
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


def fit_decodes(name: str, decodes: Sequence[Measured]) -> Coefficients:
    """Return `FittedLatency`'s coefficients for decodes. Raises `BadRequest` as `fit_latency`."""
    rows = [(1, work.context, work.decodes) for work, _ in decodes]
    return _fit(name, rows, decodes)


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
