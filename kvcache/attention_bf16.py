"""Attention in bfloat16 on a CPU: decodes read the pages in place, prefills use torch's kernel.

bfloat16 is not bit-stable anyway (its matrix products are not), so nothing here has to be: this is
whatever is fastest.

- *Decode*, and chunks of a few tokens. A work item is one token: its pages are read once, as they
  lie, for all heads, with the running maximum of FlashAttention, in float32. Nothing is gathered,
  padded or masked, whatever the lengths.
- *Prefill.* A chunk attends to what came before it without any mask, the query heads that share a
  KV head as rows of one product, and to itself causally; the log-sum-exps merge the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numba
import numpy as np
import torch

from kvcache.attention import Span
from kvcache.native import bf16, exp, i32_at, i64_at, inlined, native, parallel, to_bf16, u16_at

__all__ = ["Bf16Plan", "compiled"]

FEW = 8  # tokens of a chunk that are better taken one by one, as decodes are
PARALLEL_KEYS = 2048  # keys of all heads below which waking other threads costs more than it saves
flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def compiled(kv_heads: int, group: int, dim: int, page_size: int) -> None:
    """Compile what a plan needs, which takes seconds the first time, before there is a request."""
    _append(*[0] * 11)
    for decode in _decoders(kv_heads, group, dim, page_size):
        decode(*[0] * 12, np.float32(1.0))  # of no sequences


class Bf16Plan:
    """Where each row's keys and values go, and what it attends to; for all layers of a step."""

    def __init__(self, spans: Sequence[Span], page_size: int, group: int) -> None:
        self._page_size = page_size
        self._group = group
        self._prefills = [_Prefill(span, page_size) for span in spans if span.count > FEW]
        single = [(span, at) for span in spans if span.count <= FEW for at in range(span.count)]
        self._count = len(single)
        self._rows = np.array([span.row + at for span, at in single], dtype=np.int32)
        self._lengths = np.array([span.start + at + 1 for span, at in single], dtype=np.int32)
        used = -(-self._lengths // page_size)
        self._table = np.zeros((self._count, max(used, default=1)), dtype=np.int32)
        for row, (span, _), pages in zip(self._table, single, used, strict=True):
            row[:pages] = span.pages[:pages]
        self._keys = int(self._lengths.sum())
        self._slots = _slots(spans, page_size)

    def append(self, pages: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write the rows' keys and values, `[rows, kv_heads, head_dim]`, into one layer's pages,
        `[pages, 2, page_size, kv_heads, head_dim]`."""
        width = k.shape[1] * k.shape[2]
        _append(
            pages.data_ptr(), pages.stride(0), pages.stride(1), k.data_ptr(), v.data_ptr(),
            k.stride(0), v.stride(0), width, self._slots.ctypes.data, len(self._slots),
            self._page_size,
        )  # fmt: skip

    def attend(self, pages: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        """`q` and the result are `[rows, heads, head_dim]`; padding rows come out as anything."""
        out = torch.empty(q.shape, dtype=q.dtype)
        _, _, _, kv_heads, dim = pages.shape
        if self._count:
            serial, shared = _decoders(kv_heads, self._group, dim, self._page_size)
            alone = self._count == 1 or self._keys * kv_heads < PARALLEL_KEYS
            (serial if alone else shared)(
                self._count, q.data_ptr(), q.stride(0), out.data_ptr(), out.stride(0),
                pages.data_ptr(), pages.stride(0), pages.stride(1), self._table.ctypes.data,
                self._table.shape[1], self._rows.ctypes.data, self._lengths.ctypes.data,
                np.float32(dim**-0.5),
            )  # fmt: skip
        for prefill in self._prefills:
            prefill.attend(pages, q, out)
        return out


class _Prefill:
    """A chunk of one sequence."""

    def __init__(self, span: Span, page_size: int) -> None:
        self._span = span
        used = -(-(span.start + span.count) // page_size)
        self._pages = torch.tensor(span.pages[:used], dtype=torch.int64)

    def attend(self, pages: torch.Tensor, q: torch.Tensor, out: torch.Tensor) -> None:
        span, (_, _, _, heads, dim) = self._span, pages.shape
        end = span.start + span.count
        # [2, heads, keys, dim]
        kv = pages.index_select(0, self._pages).permute(1, 3, 0, 2, 4).reshape(2, heads, -1, dim)
        rows = slice(span.row, span.row + span.count)
        group = q.shape[1] // heads
        asked = q[rows].transpose(0, 1).contiguous()  # [query heads, count, dim]
        own = kv[:, :, span.start : end]
        shared = own.unsqueeze(2).expand(2, heads, group, span.count, dim).flatten(1, 2)
        result, sums = flash(asked[None], shared[0][None], shared[1][None], 0.0, True)
        if span.start:
            before = kv[:, None, :, : span.start]
            grouped = asked.view(1, heads, group * span.count, dim)
            earlier, earlier_sums = flash(grouped, before[0], before[1], 0.0, False)
            # o = Σ eˡ oₗ / Σ eˡ over the two parts, of which l are the log-sum-exps.
            share = torch.sigmoid(sums - earlier_sums.reshape(sums.shape)).unsqueeze(-1)
            result = torch.lerp(earlier.reshape(result.shape).float(), result.float(), share)
        out[rows] = result[0].transpose(0, 1).to(out.dtype)


def _slots(spans: Sequence[Span], page_size: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """`[rows, 2]`: page, and slot in it, of each row; rows of spans come in order from 0."""
    places = [
        (span.pages[at // page_size], at % page_size)
        for span in spans
        for at in range(span.start, span.start + span.count)
    ]
    return np.array(places, dtype=np.int64).reshape(-1, 2)


@native
def _append(
    pages: int, page_stride: int, half: int, k: int, v: int, k_stride: int, v_stride: int,
    width: int, slots: int, rows: int, page_size: int,
) -> None:  # fmt: skip
    to, keys, values, where = u16_at(pages), u16_at(k), u16_at(v), i64_at(slots)
    for row in range(rows):
        at = where[2 * row] * page_stride + where[2 * row + 1] * width
        for d in range(width):
            to[at + d] = keys[row * k_stride + d]
        for d in range(width):
            to[at + half + d] = values[row * v_stride + d]


@inlined
def _one(
    index: int, q: int, q_stride: int, out: int, out_stride: int, pool: int, page_stride: int,
    half: int, table: int, table_width: int, rows: int, lengths: int, scale: Any,
    kv_heads: int, group: int, dim: int, page_size: int,
) -> None:  # fmt: skip
    """All heads of one sequence: its pages are read from beginning to end, as they lie."""
    heads, width = kv_heads * group, kv_heads * dim
    asked, to, memory = u16_at(q), u16_at(out), u16_at(pool)
    row, length = i32_at(rows)[index], i32_at(lengths)[index]
    pages = i32_at(table)
    queries = np.empty((heads, dim), np.float32)
    page = np.empty((page_size, width), np.float32)  # its keys, then its values
    flat = np.empty(heads * page_size, np.float32)
    scores = flat.reshape((heads, page_size))
    top = np.full(heads, np.float32(-1e30), np.float32)
    shrink = np.empty(heads, np.float32)
    total = np.zeros(heads, np.float32)
    acc = np.zeros((heads, dim), np.float32)
    for h in range(heads):
        for d in range(dim):
            queries[h, d] = bf16(asked[row * q_stride + h * dim + d]) * scale
    for number in range((length + page_size - 1) // page_size):
        count = min(page_size, length - number * page_size)
        at = np.int64(pages[index * table_width + number]) * page_stride
        for j in range(count):
            for d in range(width):
                page[j, d] = bf16(memory[at + j * width + d])
        for h in range(heads):
            first = h // group * dim
            for j in range(count):
                dot = np.float32(0.0)
                for d in range(dim):
                    dot += queries[h, d] * page[j, first + d]
                scores[h, j] = dot
            for j in range(count, page_size):
                scores[h, j] = np.float32(-1e30)
        for h in range(heads):
            peak = top[h]
            for j in range(page_size):
                peak = max(peak, scores[h, j])
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
                page[j, d] = bf16(memory[at + half + j * width + d])
        for h in range(heads):
            first = h // group * dim
            added = np.float32(0.0)
            for j in range(page_size):
                added += scores[h, j]
            total[h] = total[h] * shrink[h] + added
            for d in range(dim):
                acc[h, d] *= shrink[h]
            for j in range(count):
                weight = scores[h, j]
                for d in range(dim):
                    acc[h, d] += weight * page[j, first + d]
    for h in range(heads):
        share = np.float32(1.0) / total[h]
        for d in range(dim):
            to[row * out_stride + h * dim + d] = to_bf16(acc[h, d] * share)


@cache
def _decoders(kv_heads: int, group: int, dim: int, page_size: int) -> tuple[Any, Any]:
    """The kernel for one shape of model and page, serial and parallel: with loops of any length it
    takes three times as long."""

    @native
    def serial(
        sequences: int, q: int, q_stride: int, out: int, out_stride: int, pool: int,
        page_stride: int, half: int, table: int, table_width: int, rows: int, lengths: int,
        scale: Any,
    ) -> None:  # fmt: skip
        for index in range(sequences):
            _one(
                index, q, q_stride, out, out_stride, pool, page_stride, half, table, table_width,
                rows, lengths, scale, kv_heads, group, dim, page_size,
            )  # fmt: skip

    @parallel
    def shared(
        sequences: int, q: int, q_stride: int, out: int, out_stride: int, pool: int,
        page_stride: int, half: int, table: int, table_width: int, rows: int, lengths: int,
        scale: Any,
    ) -> None:  # fmt: skip
        for index in numba.prange(sequences):
            _one(
                index, q, q_stride, out, out_stride, pool, page_stride, half, table, table_width,
                rows, lengths, scale, kv_heads, group, dim, page_size,
            )  # fmt: skip

    return serial, shared
