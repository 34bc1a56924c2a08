"""The merge of partial results of float32 attention on a CPU, with exact bits.

It is that of `kvcache.attention.partial`, by the exponential of `exact_f32`: within the kernel of
`stable_attention`, and of the results that several holders return.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvcache.kernels.exact_f32 import exp
from kvcache.kernels.jit import exact_jit, f32_at

__all__ = ["merge", "merge_rows"]


@exact_jit
def merge_rows(
    values: Any, tops: Any, totals: Any, other_values: Any, other_tops: Any, other_totals: Any,
    rows: Any, dim: Any,
) -> None:  # fmt: skip
    """Merge other partial results into these; all but `rows` and `dim` are addresses.

    Products and sums are apart: fused, they would not be the same in either order.
    """
    top, total, other_top, other_total = (
        f32_at(tops), f32_at(totals), f32_at(other_tops), f32_at(other_totals)
    )  # fmt: skip
    for r in range(rows):
        peak = max(top[r], other_top[r])
        scale, other_scale = exp(top[r] - peak), exp(other_top[r] - peak)
        mine, other = f32_at(values + 4 * r * dim), f32_at(other_values + 4 * r * dim)
        for d in range(dim):
            mine[d] = mine[d] * scale + other[d] * other_scale
        total[r] = total[r] * scale + other_total[r] * other_scale
        top[r] = peak


def merge(sums: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> None:
    """Merge partial results into `sums`.

    Each has values `[…, dim]`, tops and sums `[…, 1]`, float32 and contiguous.
    """
    values, top, total = sums
    other_values, other_top, other_total = other
    merge_rows(
        values.data_ptr(), top.data_ptr(), total.data_ptr(),
        other_values.data_ptr(), other_top.data_ptr(), other_total.data_ptr(),
        top.numel(), values.shape[-1],
    )  # fmt: skip


merge_rows(0, 0, 0, 0, 0, 0, 0, 0)  # compiles it
