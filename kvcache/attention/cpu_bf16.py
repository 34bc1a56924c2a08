"""bfloat16 attention on a CPU: pages are read in place or packed for register tiles.

bfloat16 matrix products are not bit-stable, so this module does not have to be either; it uses the
fastest kernel for each part of a step:

- `decode_attention` for segments with one row, as in decoding.
- `prefill_attention`, where the processor supports it, for segments with several rows: a chunk of a
  prompt, or a prefix that sequences share.
- torch's flash kernel for chunks on other processors: once over the earlier keys without a mask,
  with the query heads of a KV head as rows of one product, and once over the chunk itself,
  causally.

Segments are split so that all threads have work. The partial results of a row are merged by their
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
from kvcache.kernels import decode_attention, prefill_attention
from kvcache.kernels.decode_attention import DecodeAttention
from kvcache.kernels.jit import (
    ParallelKernel,
    exp,
    f32_at,
    f32_to_bf16,
    i32_at,
    i64_at,
    inline_jit,
    jit,
    next_item,
    u16_at,
)
from kvcache.kernels.prefill_attention import PrefillAttention
from kvcache.kernels.segments import KVSegment
from kvcache.sequences import Span

__all__ = ["Bf16Plan", "precompile", "split_segment"]

SINGLE_ROWS = 8  # chunks up to this length are faster row by row than with torch's kernel
MIN_SAVING = 128  # keys that sharing a segment must save
MIN_KEYS = 128  # keys of a segment that is split off, at least
ITEMS_PER_THREAD = 4  # so that threads finish together
PARALLEL_KEYS = 512  # keys of all rows from which waking other threads pays
flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def precompile(kv_heads: int, group: int, dim: int, page_size: int) -> None:
    """Compile the kernels of a plan before the first request; it takes seconds the first time."""
    _append(*[0] * 11)
    decode_attention.kernel(kv_heads, group, dim, page_size)
    _merge_kernel(kv_heads * group, dim)
    if prefill_attention.supports(group, dim):
        prefill_attention.kernels(kv_heads, group, dim, page_size)


class Bf16Plan:
    """A `Plan` in bfloat16 on CPUs; see the module's docstring."""

    def __init__(
        self, spans: Sequence[Span], *, kv_heads: int, group: int, dim: int, page_size: int
    ) -> None:
        self._page_size = page_size
        self._heads, self._dim = kv_heads * group, dim
        self._slots = row_slots(spans, page_size)
        tiled = prefill_attention.supports(group, dim)
        single = 1 if tiled else SINGLE_ROWS
        rows = [row for span in spans if span.count <= single for row in _rows(span)]
        chunks = [span for span in spans if span.count > single]
        segments = segments_of(rows, page_size, min_saving=MIN_SAVING if tiled else None)
        if tiled:
            segments += [Segment(_rows(span), 0, span.start + span.count) for span in chunks]
        self._flash = [] if tiled else [_FlashChunk(span, page_size) for span in chunks]
        work = sum(len(segment.rows) * (segment.end - segment.begin) for segment in segments)
        self._parallel = work >= PARALLEL_KEYS
        if self._parallel:
            target = max(work // (ITEMS_PER_THREAD * torch.get_num_threads()), MIN_KEYS)
            segments = [
                part
                for segment in segments
                for part in split_segment(segment, target, kv_heads, group, page_size)
            ]
        counts = Counter(row.row for segment in segments for row in segment.rows)
        merges, self._partials = [], 0
        next_partial = dict.fromkeys(counts, -1)
        for number, count in counts.items():
            if count > 1:
                merges.append((number, self._partials, count))
                next_partial[number] = self._partials
                self._partials += count
        single_row: list[KVSegment] = []
        multi_row: list[KVSegment] = []
        for segment in segments:
            readers = [
                (row.row, min(row.length, segment.end), next_partial[row.row])
                for row in segment.rows
            ]
            for row in segment.rows:
                next_partial[row.row] += counts[row.row] > 1
            pages = segment.rows[0].pages[segment.begin // page_size : -(-segment.end // page_size)]
            kv_segment = KVSegment(readers, pages, segment.begin, segment.end)
            (multi_row if len(readers) > 1 else single_row).append(kv_segment)
        self._merges = np.array(merges, dtype=np.int32)
        shape = (kv_heads, group, dim, page_size)
        self._decode = DecodeAttention(single_row, *shape) if single_row else None
        self._prefill = PrefillAttention(multi_row, *shape) if multi_row else None

    def append(self, pages: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """See `Plan.append`."""
        width = k.shape[1] * k.shape[2]
        _append(
            pages.data_ptr(), pages.stride(0), pages.stride(1), k.data_ptr(), v.data_ptr(),
            k.stride(0), v.stride(0), width, self._slots.ctypes.data, len(self._slots),
            self._page_size,
        )  # fmt: skip

    def attend(self, pages: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        """See `Plan.attend`."""
        out = torch.empty(q.shape, dtype=q.dtype)
        if len(self._slots) < len(out):
            out[len(self._slots) :] = 0
        # Per partial result and head: the weighted values, the sum of weights, the maximal score.
        partials = torch.empty((self._partials, self._heads, self._dim + 2))
        for attention in (self._decode, self._prefill):
            if attention is not None:
                attention.attend(pages, q, out, partials, parallel=self._parallel)
        if len(self._merges):
            _merge_kernel(self._heads, self._dim).run_serial(
                len(self._merges), out.data_ptr(), out.stride(0), self._merges.ctypes.data,
                partials.data_ptr(),
            )  # fmt: skip
        for chunk in self._flash:
            chunk.attend(pages, q, out)
        return out


def _rows(span: Span) -> list[Row]:
    return [Row(span.row + at, span.pages, span.start + at + 1) for at in range(span.count)]


def split_segment(
    segment: Segment, target: int, kv_heads: int, group: int, page_size: int
) -> list[Segment]:
    """Split a segment at page boundaries, so that its work items read about `target` keys each."""
    keys, rows = segment.end - segment.begin, len(segment.rows)
    items = prefill_attention.item_count(rows, kv_heads, group) if rows > 1 else 1
    parts = max(min(rows * keys // (target * items), keys // MIN_KEYS), 1)
    step = -(-keys // (parts * page_size)) * page_size
    return [
        Segment(segment.rows, begin, min(begin + step, segment.end))
        for begin in range(segment.begin, segment.end, step)
    ]


class _FlashChunk:
    """A chunk of one sequence, by torch's flash kernel."""

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
        queries = q[rows].transpose(0, 1).contiguous()  # [query heads, count, dim]
        own = kv[:, :, span.start : end]
        shared = own.unsqueeze(2).expand(2, heads, group, span.count, dim).flatten(1, 2)
        result, sums = flash(queries[None], shared[0][None], shared[1][None], 0.0, True)
        if span.start:
            before = kv[:, None, :, : span.start]
            grouped = queries.view(1, heads, group * span.count, dim)
            earlier, earlier_sums = flash(grouped, before[0], before[1], 0.0, False)
            # o = Σ eˡ oₗ / Σ eˡ over the two parts with log-sum-exps l.
            weight = torch.sigmoid(sums - earlier_sums.reshape(sums.shape)).unsqueeze(-1)
            result = torch.lerp(earlier.reshape(result.shape).float(), result.float(), weight)
        out[rows] = result[0].transpose(0, 1).to(out.dtype)


@jit
def _append(
    pages: int, page_stride: int, half: int, k: int, v: int, k_stride: int, v_stride: int,
    width: int, slots: int, rows: int, page_size: int,
) -> None:  # fmt: skip
    to, keys, values, slot_of = u16_at(pages), u16_at(k), u16_at(v), i64_at(slots)
    for row in range(rows):
        at = slot_of[2 * row] * page_stride + slot_of[2 * row + 1] * width
        for d in range(width):
            to[at + d] = keys[row * k_stride + d]
        for d in range(width):
            to[at + half + d] = values[row * v_stride + d]


@inline_jit
def _merge(item: int, a: Any, heads: int, dim: int) -> None:
    """Merge a row's partial results p: o = Σ e^(mₚ - m) oₚ / Σ e^(mₚ - m) lₚ with m = max mₚ."""
    out, out_stride, merges, partials = u16_at(a[2]), a[3], i32_at(a[4]), f32_at(a[5])
    row, first, count = np.int64(merges[3 * item]), merges[3 * item + 1], merges[3 * item + 2]
    acc = np.empty(dim, np.float32)
    for h in range(heads):
        peak = np.float32(-1e30)
        for partial in range(first, first + count):
            peak = max(peak, partials[(partial * heads + h) * (dim + 2) + dim + 1])
        total = np.float32(0.0)
        for d in range(dim):
            acc[d] = np.float32(0.0)
        for partial in range(first, first + count):
            at = (np.int64(partial) * heads + h) * (dim + 2)
            weight = exp(partials[at + dim + 1] - peak)
            total += weight * partials[at + dim]
            for d in range(dim):
                acc[d] += weight * partials[at + d]
        for d in range(dim):
            out[row * out_stride + h * dim + d] = f32_to_bf16(acc[d] / total)


@cache
def _merge_kernel(heads: int, dim: int) -> ParallelKernel:
    """Return the kernel that merges partial results, for one shape of model."""

    @ParallelKernel
    def merge(address: Any) -> None:
        item = next_item(address)
        while item >= 0:
            _merge(item, i64_at(address), heads, dim)
            item = next_item(address)

    return merge
