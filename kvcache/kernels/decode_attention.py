"""bfloat16 attention of single query rows, as in decoding.

A work item is one query row and a run of pages. The kernel reads the pages in place, once for all
heads of the row, with the online softmax of FlashAttention in float32. It gathers, pads and masks
nothing, whatever the lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from kvcache.kernels.jit import (
    ParallelKernel,
    bf16_to_f32,
    exp,
    f32_at,
    f32_bits,
    f32_from_bits,
    f32_to_bf16,
    fmax,
    i32_at,
    i64_at,
    inline_jit,
    next_item,
    u16_at,
)
from kvcache.kernels.segments import KVSegment

__all__ = ["DecodeAttention", "kernel"]


class DecodeAttention:
    """The single-row segments of a step, planned once for all layers."""

    def __init__(
        self, segments: Sequence[KVSegment], kv_heads: int, group: int, dim: int, page_size: int
    ) -> None:
        self._kernel = kernel(kv_heads, group, dim, page_size)
        self._scale = f32_bits(dim**-0.5)
        first = 0
        items: list[tuple[int, ...]] = []
        for ((row, _, partial),), pages, begin, end in segments:
            items.append((row, partial, first, end - begin))
            first += len(pages)
        self._table = np.concatenate([segment.pages for segment in segments])
        self._items = np.array(items, dtype=np.int32)

    def attend(
        self, pages: torch.Tensor, q: torch.Tensor, out: torch.Tensor, partials: torch.Tensor,
        *, parallel: bool,
    ) -> None:  # fmt: skip
        """Attend over one layer's `pages`, `[pages, 2, page_size, kv_heads, head_dim]`.

        `q` and `out` are `[rows, heads, head_dim]`. Partial results go to `partials`,
        `[partials, heads, head_dim + 2]` float32: the weighted values, the sum of weights, and the
        maximal score.
        """
        parallel = parallel and len(self._items) > 1
        run = self._kernel.run_parallel if parallel else self._kernel.run_serial
        run(
            len(self._items), q.data_ptr(), q.stride(0), out.data_ptr(), out.stride(0),
            pages.data_ptr(), pages.stride(0), pages.stride(1), self._table.ctypes.data,
            self._items.ctypes.data, partials.data_ptr(), self._scale,
        )  # fmt: skip


@inline_jit
def _attend(item: int, a: Any, kv_heads: int, group: int, dim: int, page_size: int) -> None:
    heads, width = kv_heads * group, kv_heads * dim
    q, q_stride, out, out_stride = u16_at(a[2]), a[3], u16_at(a[4]), a[5]
    memory, page_stride, half, table = u16_at(a[6]), a[7], a[8], i32_at(a[9])
    items, partials, scale = i32_at(a[10]), f32_at(a[11]), f32_from_bits(a[12])
    row, partial = np.int64(items[4 * item]), np.int64(items[4 * item + 1])
    first_page, keys = items[4 * item + 2], items[4 * item + 3]
    queries = np.empty((heads, dim), np.float32)
    page = np.empty((page_size, width), np.float32)  # first the keys of a page, then its values
    flat = np.empty(heads * page_size, np.float32)
    scores = flat.reshape((heads, page_size))
    top = np.full(heads, np.float32(-1e30), np.float32)
    shrink = np.empty(heads, np.float32)
    total = np.zeros(heads, np.float32)
    acc = np.zeros((heads, dim), np.float32)
    for h in range(heads):
        for d in range(dim):
            queries[h, d] = bf16_to_f32(q[row * q_stride + h * dim + d]) * scale
    for number in range((keys + page_size - 1) // page_size):
        count = min(page_size, keys - number * page_size)
        at = np.int64(table[first_page + number]) * page_stride
        for j in range(count):
            for d in range(width):
                page[j, d] = bf16_to_f32(memory[at + j * width + d])
        for h in range(heads):
            lead = h // group * dim
            for j in range(count):
                dot = np.float32(0.0)
                for d in range(dim):
                    dot += queries[h, d] * page[j, lead + d]
                scores[h, j] = dot
            for j in range(count, page_size):
                scores[h, j] = np.float32(-1e30)
        for h in range(heads):
            peak = top[h]
            for j in range(page_size):
                peak = fmax(peak, scores[h, j])
            shrink[h] = top[h] - peak
            top[h] = peak
            for j in range(page_size):
                scores[h, j] -= peak
        for i in range(heads * page_size):
            flat[i] = exp(flat[i])
        for h in range(heads):
            shrink[h] = exp(shrink[h])
        for j in range(count):
            for d in range(width):
                page[j, d] = bf16_to_f32(memory[at + half + j * width + d])
        for h in range(heads):
            lead = h // group * dim
            added = np.float32(0.0)
            for j in range(page_size):
                added += scores[h, j]
            total[h] = total[h] * shrink[h] + added
            for d in range(dim):
                acc[h, d] *= shrink[h]
            for j in range(count):
                weight = scores[h, j]
                for d in range(dim):
                    acc[h, d] += weight * page[j, lead + d]
    for h in range(heads):
        if partial < 0:
            inverse = np.float32(1.0) / total[h]
            for d in range(dim):
                out[row * out_stride + h * dim + d] = f32_to_bf16(acc[h, d] * inverse)
        else:
            at = (partial * heads + h) * (dim + 2)
            for d in range(dim):
                partials[at + d] = acc[h, d]
            partials[at + dim] = total[h]
            partials[at + dim + 1] = top[h]


@cache
def kernel(kv_heads: int, group: int, dim: int, page_size: int) -> ParallelKernel:
    """Return the kernel for one shape of model and page.

    Constant loop bounds make it three times as fast as variable ones.
    """

    @ParallelKernel
    def attend(address: Any) -> None:
        item = next_item(address)
        while item >= 0:
            _attend(item, i64_at(address), kv_heads, group, dim, page_size)
            item = next_item(address)

    return attend
