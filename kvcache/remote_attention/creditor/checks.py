"""What a creditor checks in a plan before it plans anything."""

from __future__ import annotations

import numpy as np

from kvcache.errors import BadRequest, TooLarge
from kvcache.memory import KVLayout
from kvcache.pages import SCRATCH_PAGE
from kvcache.remote_attention.exchange import AttentionShape, Limits, StepPlan

__all__ = ["check_plan"]


def check_plan(plan: StepPlan, shape: AttentionShape, layout: KVLayout, limits: Limits) -> None:
    """Check a plan against the pool, and against the limits on what it makes the creditor do.

    Raises `BadRequest` for one that does not fit the pool, and `TooLarge` for one over a limit.
    Whether pages belong to loans of the debtor is the caller's to check.
    """
    if (plan.dtype, plan.heads, plan.group) != (
        shape.dtype,
        shape.heads,
        shape.heads // shape.kv_heads,
    ):
        raise BadRequest(
            f"queries in {plan.dtype} of {plan.heads} heads in groups of {plan.group}, for pages "
            f"in {shape.dtype} and {shape.heads} heads in groups of {shape.heads // shape.kv_heads}"
        )
    if not plan.spans:
        raise BadRequest("a plan without spans")
    row = runs = row_keys = 0
    for span in plan.spans:
        if span.row != row or span.count < 1 or span.start < 0 or not len(span.pages):
            raise BadRequest(f"a span of no rows or pages, or out of order: row {span.row}")
        row += span.count
        _limit("positions", span.end, limits.context)
        if span.pages.min() <= SCRATCH_PAGE or span.pages.max() >= layout.pages:
            raise BadRequest(f"a page id outside (0, {layout.pages})")
        numbers = np.sort(span.numbers).astype(np.int64)  # a product of int32 may wrap
        if numbers[0] < 0 or numbers[-1] * layout.page_size >= span.end:
            raise BadRequest(f"a page of no keys before position {span.end}")
        runs += 1 + int((np.diff(numbers) > 1).sum())
        row_keys += span.count * len(numbers) * layout.page_size
    if row != plan.rows:
        raise BadRequest(f"the spans have {row} rows, not {plan.rows}")
    _limit("runs of pages", runs, limits.runs)
    _limit("keys of rows", row_keys, limits.row_keys)


def _limit(what: str, count: int, most: int) -> None:
    if count > most:
        raise TooLarge(f"{count} {what} in a step, {most} at most")
