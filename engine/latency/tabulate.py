"""Makes a `TableLatency` of measured steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import median

from engine.latency.fit import Fit, Measured, divide, fit_decodes, residuals
from engine.latency.table import Points, TableLatency, interpolate
from engine.protocol import BadRequest

__all__ = ["tabulate_latency"]


def tabulate_latency(
    measured: Sequence[Measured],
    mixed: Sequence[Measured] = (),
    *,
    square_ms: float | None = None,
) -> tuple[TableLatency, Fit]:
    """Make a table of steps that compute either prompts or decodes, and of `mixed` ones.

    A count's time is the median of its steps. Where more work was measured to take less time, the
    mean stands for both. `square_ms` is fitted to the chunks that do not start at their
    prompt's begin; give it where none was measured.

    Raises: `BadRequest` for a step in `measured` with both or neither, for a time that is not
    positive, and if there are no prompts, or no decodes that tell the batch's time from the
    context's.
    """
    prompts, decodes = divide(measured)
    context_ms = _context_ms(decodes)
    batches = _medians((w.decodes, s * 1e3 - context_ms * w.context) for w, s in decodes)
    rows = _rows(prompts, batches[0][1])
    table = TableLatency(
        rows,
        _rising((batch, ms - interpolate(rows, batch)) for batch, ms in batches),
        _square_ms(rows, prompts) if square_ms is None else square_ms,
        context_ms,
    )
    table = replace(table, mixed_ms=_mixed_ms(table, mixed))
    return table, Fit(residuals(table, prompts), residuals(table, decodes))


def _rows(prompts: Sequence[Measured], decode_ms: float) -> Points:
    """Return the times of whole prompts. Without one of one token, a decode is the shortest."""
    single = [step for step in prompts if _before(step) == 0]
    counts = {step.work.prompt_tokens for step in single}
    # Several prompts in a step only decide where no single one has as many tokens.
    several = [s for s in prompts if _before(s) < 0 and s.work.prompt_tokens not in counts]
    points = _medians((work.prompt_tokens, seconds * 1e3) for work, seconds in single + several)
    if not points:
        raise BadRequest("prefill: no step was measured that starts at its prompts' begin")
    if points[0][0] > 1:
        points.insert(0, (1, min(decode_ms, points[0][1])))
    return _rising(points)


def _before(step: Measured) -> int:
    """Return by how much a step's squares exceed those of one whole prompt of as many tokens."""
    return step.work.prompt_squares - step.work.prompt_tokens**2


def _medians(points: Iterable[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return each count's median, in ascending order of the counts."""
    times: dict[int, list[float]] = defaultdict(list)
    for count, ms in points:
        times[count].append(ms)
    return [(count, median(times[count])) for count in sorted(times)]


def _rising(points: Iterable[tuple[int, float]]) -> Points:
    """Return the non-negative times that do not fall and are nearest to these (least squares).

    Neighbours that fall are pooled: all of them get their mean.
    """
    pools: list[tuple[list[int], float]] = []  # counts, and the sum of their times
    for count, ms in points:
        counts, total = [count], max(ms, 0.0)
        while pools and pools[-1][1] * len(counts) > total * len(pools[-1][0]):
            before, its_total = pools.pop()
            counts, total = before + counts, its_total + total
        pools.append((counts, total))
    return tuple((count, total / len(counts)) for counts, total in pools for count in counts)


def _context_ms(decodes: Sequence[Measured]) -> float:
    """Return what a token of context costs, by the steps of each batch that differ in it alone.

    Where none do, it is the formula's, for which all batches are on a line.
    """
    _, context_ms, _ = fit_decodes("decode", decodes)
    batches: dict[int, list[Measured]] = defaultdict(list)
    for step in decodes:
        batches[step.work.decodes].append(step)
    product = square = 0.0
    for steps in batches.values():
        # Least squares on the relative error, around each batch's own mean.
        weights = [1 / seconds**2 for _, seconds in steps]
        context = sum(w * s.work.context for w, s in zip(weights, steps, strict=True))
        ms = sum(w * s.seconds * 1e3 for w, s in zip(weights, steps, strict=True))
        for weight, (work, seconds) in zip(weights, steps, strict=True):
            beyond = work.context - context / sum(weights)
            product += weight * beyond * (seconds * 1e3 - ms / sum(weights))
            square += weight * beyond**2
    # Rounding leaves more than nothing of equal contexts.
    least = 1e-9 * sum(s.work.context**2 / s.seconds**2 for s in decodes)
    return max(product / square, 0.0) if square > least else context_ms


def _square_ms(rows: Points, prompts: Sequence[Measured]) -> float:
    """Return what fits the later chunks best."""
    return _slope(
        (_before(step), interpolate(rows, step.work.prompt_tokens), step.seconds * 1e3)
        for step in prompts
        if _before(step) > 0
    )


def _mixed_ms(table: TableLatency, mixed: Sequence[Measured]) -> float:
    """Return what fits the steps with prompts and decodes best."""
    return _slope((work.context, table.seconds(work) * 1e3, s * 1e3) for work, s in mixed)


def _slope(points: Iterable[tuple[float, float, float]]) -> float:
    """Return the x >= 0 for which `base + x·amount` is nearest to the times, 0 without any.

    Each point is (amount, base, time). Least squares on the relative error.
    """
    product = square = 0.0
    for amount, base, ms in points:
        product += amount / ms * (1 - base / ms)
        square += (amount / ms) ** 2
    return max(product / square, 0.0) if square else 0.0
