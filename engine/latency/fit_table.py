"""Fits a `TableLatency` to steps that nobody arranged; `tabulate_latency` needs arranged ones.

The table's rows have points at powers of two, where steps of about that size were measured. The
time of each point, and what squares, contexts and sequences cost, are fitted together, by least
squares on the error relative to the model's time. Points do not fall, and nothing is negative.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from engine.latency.fit import Matrix, Measured
from engine.latency.rows import padded_rows
from engine.latency.table import TableLatency

__all__ = ["fit_table"]

PER_POINT = 3  # steps between a point and the one before, at least …
BEYOND = 1.25  # … with so many times the rows of the one before, …
FEW = 8  # … or any more, up to so many rows
ROUNDS = 3  # of a fit: the error of each is relative to the model before


def fit_table(measured: Sequence[Measured], row_multiple: int = 0) -> TableLatency:
    """Return the table that is nearest to the steps, of which there are some.

    The engine pads the rows of its steps as `row_multiple` has it.
    """
    work = [step.work for step in measured]
    times = np.array([seconds * 1e3 for _, seconds in measured])
    rows = np.array([padded_rows(w.prompt_tokens + w.decodes, row_multiple) for w in work])
    counts = _counts(rows)
    columns: list[NDArray[np.float64]] = [np.ones(len(rows))]  # the first point
    for before, after in pairwise(counts):  # by how much the next one exceeds the one before
        most = np.inf if after == counts[-1] else 1.0
        columns.append(np.clip((rows - before) / (after - before), 0.0, most))
    columns += [
        np.array([max(w.prompt_squares - w.prompt_tokens**2, 0) for w in work], dtype=float),
        np.array([w.context for w in work], dtype=float),
        np.array([w.decodes for w in work], dtype=float),
    ]
    terms = np.stack(columns, axis=1)
    scale = np.maximum(np.abs(terms).max(axis=0), 1e-300)
    terms /= scale
    expected = times
    for _ in range(ROUNDS + 1):
        found = _not_negative(terms / expected[:, None], times / expected)
        expected = np.maximum(terms @ found, times.min())
    *steps, square_ms, context_ms, sequence_ms = map(float, found / scale)
    return TableLatency(
        tuple(zip(counts, accumulate(steps), strict=True)),
        ((1, sequence_ms), (2, 2 * sequence_ms)),
        square_ms,
        context_ms,
        row_multiple=row_multiple,
    )


def _counts(rows: NDArray[np.int64]) -> list[int]:
    """Return the rows at which the table has points."""
    counts = [1 << (int(rows.min()).bit_length() - 1)]
    count = counts[0]
    while count < rows.max():
        count *= 2
        inside = rows[(rows > counts[-1]) & (rows <= count)]
        # Hardly more rows than at the point before do not tell the slope from there on.
        if (inside > max(BEYOND * counts[-1], counts[-1] + 1)).sum() >= PER_POINT or (
            count <= FEW and len(inside) >= PER_POINT
        ):
            counts.append(count)
    return counts


def _not_negative(terms: Matrix, aims: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the x >= 0 that minimises |terms·x - aims|², by Lawson and Hanson's active set."""
    x = np.zeros(terms.shape[1])
    free = np.zeros(len(x), dtype=bool)
    for _ in range(3 * len(x)):
        gain = np.where(free, -np.inf, terms.T @ (aims - terms @ x))
        if gain.max() <= 1e-9 * len(aims):
            break
        free[gain.argmax()] = True
        while free.any():
            solved = np.zeros(len(x))
            solved[free] = np.linalg.lstsq(terms[:, free], aims, rcond=None)[0]
            below = free & (solved <= 0)
            if not below.any():
                x = solved
                break
            share = (x[below] / np.maximum(x[below] - solved[below], 1e-300)).min()
            x += share * (solved - x)
            free &= x > 1e-12
            x[~free] = 0.0
    return x
