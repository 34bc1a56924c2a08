"""The merge of partial results of float32 attention on a CPU, with exact bits.

It is that of `kvcache.attention.partial`, by the exponential of `exact_f32`: within the kernel of
`stable_attention`, and of the results that several holders return.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvcache.kernels.exact_f32 import exp
from kvcache.kernels.jit import exact_jit, f32_at, i64_at

__all__ = ["is_attention", "merge", "merge_all", "merge_rows"]


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


@exact_jit
def _merge_all(
    rows_at: Any, pairs_at: Any, pairs: Any, results_at: Any, results: Any, out: Any, heads: Any,
    dim: Any,
) -> None:  # fmt: skip
    rows, merged, found = i64_at(rows_at), i64_at(pairs_at), i64_at(results_at)
    for n in range(pairs):
        left, right = 3 * merged[2 * n], 3 * merged[2 * n + 1]
        merge_rows(
            rows[left], rows[left + 1], rows[left + 2],
            rows[right], rows[right + 1], rows[right + 2], heads, dim,
        )  # fmt: skip
    for n in range(results):
        row = 3 * found[2 * n]
        values, total = f32_at(rows[row]), f32_at(rows[row + 2])
        to = f32_at(out + 4 * found[2 * n + 1] * heads * dim)
        for h in range(heads):
            for d in range(h * dim, (h + 1) * dim):
                # The sum of no products may be −0; it is +0 here.
                to[d] = values[d] / total[h] + np.float32(0.0)


def merge_all(
    rows: npt.NDArray[np.int64],
    pairs: npt.NDArray[np.int64],
    results: npt.NDArray[np.int64],
    out: torch.Tensor,
) -> None:
    """Merge partial results where they lie, and write attention to `out`.

    `rows` is `[rows, 3]`: the addresses of each row's values `[heads, dim]`, tops and sums
    `[heads]`. The second row of each of `pairs` is merged into the first, in their order. Then the
    first row of each of `results`, divided by its sums, becomes the row of `out` that is its
    second number. `out` is `[rows, heads, dim]`. All are float32 and contiguous.
    """
    _, heads, dim = out.shape
    _merge_all(
        rows.ctypes.data, pairs.ctypes.data, len(pairs), results.ctypes.data, len(results),
        out.data_ptr(), heads, dim,
    )  # fmt: skip


@exact_jit
def _are_finite(at: Any, count: Any) -> Any:
    numbers = f32_at(at)
    rest = np.float32(0.0)  # NaN as soon as one is added that is infinite or NaN
    for n in range(count):
        rest += numbers[n] - numbers[n]
    return rest == np.float32(0.0)


@exact_jit
def _is_attention(values: Any, tops: Any, totals: Any, rows: Any, dim: Any) -> Any:
    if not (_are_finite(values, rows * dim) and _are_finite(tops, rows)):
        return False
    sums, least = f32_at(totals), np.float32(np.inf)
    for n in range(rows):
        least = min(least, sums[n])
    return _are_finite(totals, rows) and least > np.float32(0.0)


def is_attention(values: torch.Tensor, top: torch.Tensor, total: torch.Tensor) -> bool:
    """Whether all numbers are finite, and all sums positive.

    Shapes are `[…, dim]` and twice `[…]`, float32 and contiguous.
    """
    return bool(
        _is_attention(
            values.data_ptr(), top.data_ptr(), total.data_ptr(), top.numel(), values.shape[-1]
        )
    )


# Compile them.
merge_rows(0, 0, 0, 0, 0, 0, 0, 0)
_merge_all(0, 0, 0, 0, 0, 0, 0, 0)
_is_attention(0, 0, 0, 0, 0)
