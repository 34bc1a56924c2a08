"""Attention in bfloat16 on a CPU: pages are read in place, or laid out for tiles.

bfloat16 is not bit-stable anyway (its matrix products are not), so nothing here has to be: this is
whatever is fastest.

- A row that reads alone (`few_bf16.py`): a decode.
- Rows that read the same pages (`many_bf16.py`, where the processor can): a chunk of a prompt, or
  sequences that begin alike.
- A chunk elsewhere: torch's flash kernel, once over what came before without any mask, the query
  heads that share a KV head as rows of one product, and once over itself, causally.

Work is cut so that all threads have some; what a row has read in pieces is merged by their
log-sum-exps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from kvcache.attention.cascade import Row, Segment, segments_of
from kvcache.attention.plan import row_slots
from kvcache.kernels import decode_attention as few_bf16
from kvcache.kernels import prefill_attention as many_bf16
from kvcache.kernels.decode_attention import Few
from kvcache.kernels.jit import (
    Shared,
    exp,
    f32_at,
    i32_at,
    i64_at,
    inlined,
    native,
    next_item,
    to_bf16,
    u16_at,
)
from kvcache.kernels.prefill_attention import Many
from kvcache.kernels.segments import KVSegment
from kvcache.sequences.step import Span

__all__ = ["Bf16Plan", "compiled"]

FEW = 8  # tokens of a chunk that are better taken one by one than by torch's kernel
SHARE = 128  # keys that have to be saved, to be read together
LEAST = 128  # keys of an item that is cut off
ITEMS = 4  # for each thread, so that they end together
TOGETHER = 512  # keys of all rows below which waking other threads costs more than it saves
flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def compiled(kv_heads: int, group: int, dim: int, page_size: int) -> None:
    """Compile what a plan needs, which takes seconds the first time, before there is a request."""
    _append(*[0] * 11)
    few_bf16.kernel(kv_heads, group, dim, page_size)
    _merger(kv_heads * group, dim)
    if many_bf16.fits(group, dim):
        many_bf16.kernels(kv_heads, group, dim, page_size)


class Bf16Plan:
    """Where each row's keys and values go, and what it attends to; for all layers of a step."""

    def __init__(
        self, spans: Sequence[Span], *, kv_heads: int, group: int, dim: int, page_size: int
    ) -> None:
        self._page_size = page_size
        self._heads, self._dim = kv_heads * group, dim
        self._slots = row_slots(spans, page_size)
        tiles = many_bf16.fits(group, dim)
        own = 1 if tiles else FEW
        rows = [row for span in spans if span.count <= own for row in _rows(span)]
        chunks = [span for span in spans if span.count > own]
        segments = segments_of(rows, page_size, min_saving=SHARE if tiles else None)
        if tiles:
            segments += [Segment(_rows(span), 0, span.start + span.count) for span in chunks]
        self._prefills = [] if tiles else [_Prefill(span, page_size) for span in chunks]
        work = sum(len(segment.rows) * (segment.end - segment.begin) for segment in segments)
        self._together = work >= TOGETHER
        if self._together:
            even = max(work // (ITEMS * torch.get_num_threads()), LEAST)
            segments = [
                piece
                for segment in segments
                for piece in _cut(segment, even, kv_heads, group, page_size)
            ]
        pieces = Counter(row.row for segment in segments for row in segment.rows)
        merges, self._pieces = [], 0
        place = dict.fromkeys(pieces, -1)
        for number, count in pieces.items():
            if count > 1:
                merges.append((number, self._pieces, count))
                place[number] = self._pieces
                self._pieces += count
        reads: tuple[list[KVSegment], list[KVSegment]] = [], []
        for segment in segments:
            readers = [
                (row.row, min(row.length, segment.end), place[row.row]) for row in segment.rows
            ]
            for row in segment.rows:
                place[row.row] += pieces[row.row] > 1
            pages = segment.rows[0].pages[segment.begin // page_size : -(-segment.end // page_size)]
            reads[len(readers) > 1].append(KVSegment(readers, pages, segment.begin, segment.end))
        self._merges = np.array(merges, dtype=np.int32)
        shape = (kv_heads, group, dim, page_size)
        self._few = Few(reads[0], *shape) if reads[0] else None
        self._many = Many(reads[1], *shape) if reads[1] else None

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
        # Of each piece of a row, for each head: the sum of weighted values, of weights, the top.
        pieces = torch.empty((self._pieces, self._heads, self._dim + 2))
        for reads in (self._few, self._many):
            if reads is not None:
                reads.attend(pages, q, out, pieces, together=self._together)
        if len(self._merges):
            _merger(self._heads, self._dim).alone(
                len(self._merges), out.data_ptr(), out.stride(0), self._merges.ctypes.data,
                pieces.data_ptr(),
            )  # fmt: skip
        for prefill in self._prefills:
            prefill.attend(pages, q, out)
        return out


def _rows(span: Span) -> list[Row]:
    return [Row(span.row + at, span.pages, span.start + at + 1) for at in range(span.count)]


def _cut(segment: Segment, even: int, kv_heads: int, group: int, page_size: int) -> list[Segment]:
    """In pieces, between pages, of which an item does not have much more than `even` to do."""
    keys, rows = segment.end - segment.begin, len(segment.rows)
    items = many_bf16.items(rows, kv_heads, group) if rows > 1 else 1
    pieces = max(min(rows * keys // (even * items), keys // LEAST), 1)
    step = -(-keys // (pieces * page_size)) * page_size
    return [
        Segment(segment.rows, begin, min(begin + step, segment.end))
        for begin in range(segment.begin, segment.end, step)
    ]


class _Prefill:
    """A chunk of one sequence."""

    def __init__(self, span: Span, page_size: int) -> None:
        self._span = span
        used = -(-(span.start + span.count) // page_size)
        self._pages = torch.from_numpy(span.pages[:used].astype(np.int64))

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
def _merge(item: int, a: Any, heads: int, dim: int) -> None:
    """o = Σ e^(mₚ - m) oₚ / Σ e^(mₚ - m) lₚ over the pieces of a row, m the largest of their mₚ."""
    to, out_stride, what, held = u16_at(a[2]), a[3], i32_at(a[4]), f32_at(a[5])
    row, place, pieces = np.int64(what[3 * item]), what[3 * item + 1], what[3 * item + 2]
    acc = np.empty(dim, np.float32)
    for h in range(heads):
        peak = np.float32(-1e30)
        for piece in range(place, place + pieces):
            peak = max(peak, held[(piece * heads + h) * (dim + 2) + dim + 1])
        total = np.float32(0.0)
        for d in range(dim):
            acc[d] = np.float32(0.0)
        for piece in range(place, place + pieces):
            at = (np.int64(piece) * heads + h) * (dim + 2)
            weight = exp(held[at + dim + 1] - peak)
            total += weight * held[at + dim]
            for d in range(dim):
                acc[d] += weight * held[at + d]
        for d in range(dim):
            to[row * out_stride + h * dim + d] = to_bf16(acc[d] / total)


@cache
def _merger(heads: int, dim: int) -> Shared:
    """For one shape of model."""

    @Shared
    def merges(address: Any) -> None:
        item = next_item(address)
        while item >= 0:
            _merge(item, i64_at(address), heads, dim)
            item = next_item(address)

    return merges
