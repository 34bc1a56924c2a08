"""Fits a model to steps that nobody arranged: an engine's own, under its traffic.

They compute prompts, decodes, or both. All coefficients of `FittedLatency` are fitted together, by
least squares on the relative error, and none is negative. A coefficient that explains next to
nothing is zero. Steps far above the model are left out of a second fit: then something else held
the process up.

The formula's steps of few prompt tokens may be far off, since it has one price for a prompt's token
however many there are. How long a prompt takes beside decodes depends on these steps. So a
`TableLatency` takes its place where it is clearly nearer.

In the second fit the error is relative to the model's time. Relative to the measured time, as in
`fit_latency`, the fastest of scattered steps count most: that finds steps that were held up, but is
below the mean of the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np

from engine.latency.fit import Fit, Matrix, Measured, residuals
from engine.latency.fit_table import fit_table
from engine.latency.rows import padded_rows
from engine.latency.step import Coefficients, FittedLatency, StepLatency
from engine.latency.table import TableLatency
from engine.protocol import BadRequest

__all__ = ["fit_observed"]

LEAST = 8  # steps with prompts, and steps with decodes
SPAN = 2  # the most tokens (or decodes) of a step, over the fewest
PARSIMONY = 0.99  # a further coefficient must lower the squared error below this share
FAR, NEAR = 4.0, 0.1  # a step is far above the model beyond 4 times the median error, and 10 %
COLUMNS = 6
ROUNDS = 3  # of a fit: the error of each is relative to the model before
# What a point of a table has to lower the logarithm of the squared error by, times the steps. More
# coefficients are always nearer to scattered steps (Akaike's criterion asks for 2).
GAIN_PER_POINT = 3.0


def fit_observed(
    measured: Sequence[Measured], row_multiple: int = 0
) -> tuple[FittedLatency | TableLatency, Fit]:
    """Fit the steps of one engine, which pads their rows as `row_multiple` of the model has it.

    Steps that computed nothing do not count. Raises: `BadRequest`, which says what was covered, if
    there are fewer than `LEAST` steps with prompts or with decodes, or if their sizes do not differ
    by `SPAN`.
    """
    measured = [m for m in measured if m.work.prompt_tokens or m.work.decodes]
    _check_spans(measured)
    formula, kept = _formula(measured, row_multiple)
    table = fit_table(kept, row_multiple)
    clearly = math.exp(-GAIN_PER_POINT * len(table.rows) / len(kept))
    nearer = _squared_error(table, kept) < clearly * _squared_error(formula, kept)
    model = table if nearer else formula
    return model, _fit_of(model, kept)


def _formula(
    measured: Sequence[Measured], row_multiple: int
) -> tuple[FittedLatency, list[Measured]]:
    """Return the formula, and the steps that are not far above it."""
    single = [m for m in measured if m.work.decodes == 1 and not m.work.prompt_tokens]
    others = [m for m in measured if m.work.decodes != 1 or m.work.prompt_tokens]
    if len(single) >= LEAST:
        try:
            _check_spans(others)
        except BadRequest:
            pass
        else:
            model, kept = _undisturbed(others, row_multiple)
            if (with_single := _with_single(model, single)) is not None:
                return with_single, [*kept, *_near(with_single, single)]
    return _undisturbed(measured, row_multiple)


def _squared_error(model: StepLatency, steps: Sequence[Measured]) -> float:
    """Return the sum of the squared errors, relative to the model's times."""
    times = [(seconds, model.seconds(work)) for work, seconds in steps]
    if not all(expected for _, expected in times):
        return math.inf
    return sum((seconds / expected - 1) ** 2 for seconds, expected in times)


def _with_single(model: FittedLatency, single: Sequence[Measured]) -> FittedLatency | None:
    """Return the model with a time of its own for one decode, if that is far from the model's.

    Processors may multiply one row in another way than several, several times as fast.
    """
    ratio = float(np.median([seconds / model.seconds(work) for work, seconds in single]))
    if abs(ratio - 1) <= NEAR:
        return None
    token = model.decode[1]
    left = float(np.median([seconds * 1e3 - token * work.context for work, seconds in single]))
    return replace(model, single_ms=left) if left > 0 else None


def _undisturbed(
    measured: Sequence[Measured], row_multiple: int
) -> tuple[FittedLatency, list[Measured]]:
    """Fit steps twice, the second time without those far above; return the others, too."""
    kept = _near(_fit(measured, row_multiple, rounds=0), measured)
    return _fit(kept, row_multiple, ROUNDS), kept


def _near(model: FittedLatency, steps: Sequence[Measured]) -> list[Measured]:
    """Return the steps that are not far above the model."""
    ratios = [(m.seconds - model.seconds(m.work)) / model.seconds(m.work) for m in steps]
    limit = max(NEAR, FAR * float(np.median(np.abs(ratios))))
    return [m for m, ratio in zip(steps, ratios, strict=True) if ratio <= limit]


def _fit_of(model: StepLatency, kept: Sequence[Measured]) -> Fit:
    prompts = [m for m in kept if m.work.prompt_tokens]
    decodes = [m for m in kept if m.work.decodes]
    alone = [m for m in decodes if not m.work.prompt_tokens]
    return Fit(residuals(model, prompts), residuals(model, alone or decodes))


def _check_spans(measured: Sequence[Measured]) -> None:
    _check_span("prompt tokens", [m.work.prompt_tokens for m in measured if m.work.prompt_tokens])
    _check_span("sequences that decode", [m.work.decodes for m in measured if m.work.decodes])


def _check_span(what: str, sizes: Sequence[int]) -> None:
    least, most = min(sizes, default=0), max(sizes, default=0)
    if len(sizes) < LEAST or most < SPAN * least:
        covered = "none was" if not sizes else f"{len(sizes)} were, with {least} to {most} {what}"
        raise BadRequest(
            f"at least {LEAST} steps of different sizes, from N to {SPAN}N {what}, have to be "
            f"timed; {covered}"
        )


def _fit(measured: Sequence[Measured], row_multiple: int, rounds: int) -> FittedLatency:
    # A step with both pays the larger constant. Which one that is, the smaller error tells.
    (best, least), (other, error) = (
        _rounds(measured, _rows(measured, larger, row_multiple), rounds) for larger in (0, 3)
    )
    a, b, c, d, e, f = map(float, other if error < least else best)
    decode: Coefficients = (d, e, f)
    return FittedLatency((a, b, c), decode, decode, large_batch=1, row_multiple=row_multiple)


def _rounds(measured: Sequence[Measured], rows: Matrix, rounds: int) -> tuple[Matrix, float]:
    """Return the coefficients of the rows' terms and the squared error.

    That is relative to the model's time after some rounds, and to the measured one without.
    """
    times = np.array([seconds * 1e3 for _, seconds in measured])
    found, error = _solve(rows / times[:, None], np.ones(len(times)))
    for _ in range(rounds):
        expected = np.maximum(rows @ found, times.min())
        found, error = _solve(rows / expected[:, None], times / expected)
    return found, error


def _rows(measured: Sequence[Measured], larger: int, row_multiple: int) -> Matrix:
    """Return the terms of each step, those of `FittedLatency`."""
    rows = np.zeros((len(measured), COLUMNS))
    for row, (work, _) in zip(rows, measured, strict=True):
        both = bool(work.prompt_tokens and work.decodes)
        tokens = work.prompt_tokens + work.decodes
        padding = padded_rows(tokens, row_multiple) - tokens
        if work.prompt_tokens:
            row[:3] = (not both or larger == 0, work.prompt_tokens + padding, work.prompt_squares)
            padding = 0
        if work.decodes:
            row[3:] = (not both or larger == 3, work.context, work.decodes + padding)
    return rows


def _solve(rows: Matrix, aims: Matrix) -> tuple[Matrix, float]:
    """Return x >= 0 that minimises |rows·x - aims|² with few elements above 0, and that error."""
    scale = np.abs(rows).max(axis=0)
    scale[scale == 0] = 1.0
    scaled = rows / scale
    squares, targets = scaled.T @ scaled, scaled.T @ aims
    best, least = np.zeros(COLUMNS), float(np.square(aims).sum())
    for size in range(1, COLUMNS + 1):
        found, error = best, least * PARSIMONY
        for columns in map(list, combinations(range(COLUMNS), size)):
            part = squares[np.ix_(columns, columns)]
            if np.linalg.cond(part) > 1e12:  # they cannot be told apart
                continue
            solved = np.linalg.solve(part, targets[columns])
            if solved.min() < 0:
                continue
            left = float(np.square(scaled[:, columns] @ solved - aims).sum())
            if left < error:
                found, error = np.zeros(COLUMNS), left
                found[columns] = solved
        if found is not best:
            best, least = found, error
    return best / scale, least
