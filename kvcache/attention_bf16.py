"""Attention in bfloat16 on a CPU: decodes read the pages in place, prefills use torch's kernel.

bfloat16 is not bit-stable anyway (its matrix products are not), so nothing here has to be: this is
whatever is fastest.

- *Decode*, and chunks of a few tokens. A work item is a run of pages and the rows that read it: it
  is read once, as it lies, for all their heads, with the running maximum of FlashAttention, in
  float32. Nothing is gathered, padded or masked, whatever the lengths.
- *Prefill.* A chunk attends to what came before it without any mask, the query heads that share a
  KV head as rows of one product, and to itself causally; the log-sum-exps merge the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from kvcache.attention import Span
from kvcache.native import (
    Shared,
    bf16,
    exp,
    f32,
    f32_at,
    f32_bits,
    i32_at,
    i64_at,
    inlined,
    native,
    next_item,
    to_bf16,
    u16_at,
)
from kvcache.parts import Row, parts_of

__all__ = ["Bf16Plan", "compiled"]

FEW = 8  # tokens of a chunk that are better taken one by one, as decodes are
TOGETHER = 512  # keys of all rows below which waking other threads costs more than it saves
MOST = 8  # rows of an item: what is held of them, and a page, stay in the first-level cache
SHARE = 64  # keys that have to be saved, to be read together
LEAST = 128  # keys of an item, if there are more
ITEMS = 4  # for each thread, so that they end together
flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def compiled(kv_heads: int, group: int, dim: int, page_size: int) -> None:
    """Compile what a plan needs, which takes seconds the first time, before there is a request."""
    _append(*[0] * 11)
    _kernels(kv_heads, group, dim, page_size)


class Bf16Plan:
    """Where each row's keys and values go, and what it attends to; for all layers of a step."""

    def __init__(self, spans: Sequence[Span], page_size: int, group: int) -> None:
        self._page_size = page_size
        self._group = group
        self._prefills = [_Prefill(span, page_size) for span in spans if span.count > FEW]
        few = [span for span in spans if span.count <= FEW]
        self._decodes = _Decodes(few, page_size) if few else None
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
        if self._decodes is not None:
            self._decodes.attend(pages, q, out, self._group)
        for prefill in self._prefills:
            prefill.attend(pages, q, out)
        return out


class _Decodes:
    """Rows that are taken one by one."""

    def __init__(self, spans: Sequence[Span], page_size: int) -> None:
        queries = [(span, at) for span in spans for at in range(span.count)]
        rows = [Row(span.pages, span.start + at + 1) for span, at in queries]
        keys = sum(row.length for row in rows)
        self._together = keys >= TOGETHER
        even = keys // (ITEMS * torch.get_num_threads()) if self._together else keys
        parts = parts_of(rows, page_size, share=SHARE, most=MOST, work=even, least=LEAST)
        # A row that is in one item is written by it; of others the results are put down to be
        # merged, those of a row one behind the other.
        pieces = np.zeros(len(rows), dtype=np.int32)
        for part in parts:
            pieces[part.rows] += 1
        cut = np.flatnonzero(pieces > 1)
        ends = np.cumsum(pieces[cut])
        place = np.full(len(rows), -1, dtype=np.int64)
        place[cut] = ends - pieces[cut]
        where = [span.row + at for span, at in queries]
        self._merges = np.array(
            [(where[row], place[row], pieces[row]) for row in cut], dtype=np.int32
        )
        self._items = np.empty((len(parts), 5), dtype=np.int32)
        pairs: list[tuple[int, int]] = []
        table: list[int] = []
        for item, (members, begin, end) in zip(self._items, parts, strict=True):
            item[:] = (len(table), begin, end, len(pairs), len(members))
            table += rows[members[0]].pages[begin // page_size : -(-end // page_size)]
            for row in members:
                pairs.append((where[row], place[row]))
                place[row] += pieces[row] > 1
        self._pairs = np.array(pairs, dtype=np.int32)
        self._table = np.array(table, dtype=np.int32)
        self._pieces = int(ends[-1]) if len(cut) else 0

    def attend(self, pages: torch.Tensor, q: torch.Tensor, out: torch.Tensor, group: int) -> None:
        _, _, page_size, kv_heads, dim = pages.shape
        items, merges = _kernels(kv_heads, group, dim, page_size)
        heads = kv_heads * group
        held = torch.empty((self._pieces, heads, dim + 2))  # of each: sum, its weight, top
        (items.together if self._together else items.alone)(
            len(self._items), q.data_ptr(), q.stride(0), out.data_ptr(), out.stride(0),
            pages.data_ptr(), pages.stride(0), pages.stride(1), self._table.ctypes.data,
            self._items.ctypes.data, self._pairs.ctypes.data, held.data_ptr(),
            f32_bits(dim**-0.5),
        )  # fmt: skip
        if len(self._merges):
            merges.alone(
                len(self._merges), out.data_ptr(), out.stride(0), self._merges.ctypes.data,
                held.data_ptr(),
            )  # fmt: skip


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
def _item(
    item: int, a: Any, kv_heads: int, group: int, dim: int, page_size: int, most: int
) -> None:
    """All heads of some rows, over pages that are read from beginning to end, as they lie."""
    heads, width = kv_heads * group, kv_heads * dim
    asked, q_stride, to, out_stride = u16_at(a[2]), a[3], u16_at(a[4]), a[5]
    memory, page_stride, half, table = u16_at(a[6]), a[7], a[8], i32_at(a[9])
    what, pairs, held, scale = i32_at(a[10]), i32_at(a[11]), f32_at(a[12]), f32(a[13])
    first_page, begin, end = what[5 * item], what[5 * item + 1], what[5 * item + 2]
    first, rows = what[5 * item + 3], what[5 * item + 4]
    queries = np.empty((most, heads, dim), np.float32)
    page = np.empty((page_size, width), np.float32)  # its keys, then its values
    flat = np.empty((most, heads * page_size), np.float32)
    top = np.full((most, heads), np.float32(-1e30), np.float32)
    shrink = np.empty((most, heads), np.float32)
    total = np.zeros((most, heads), np.float32)
    acc = np.zeros((most, heads, dim), np.float32)
    for r in range(rows):
        row = np.int64(pairs[2 * (first + r)])
        for h in range(heads):
            for d in range(dim):
                queries[r, h, d] = bf16(asked[row * q_stride + h * dim + d]) * scale
    for number in range((end - begin + page_size - 1) // page_size):
        count = min(page_size, end - begin - number * page_size)
        at = np.int64(table[first_page + number]) * page_stride
        for j in range(count):
            for d in range(width):
                page[j, d] = bf16(memory[at + j * width + d])
        for r in range(rows):
            for h in range(heads):
                lead = h // group * dim
                for j in range(count):
                    dot = np.float32(0.0)
                    for d in range(dim):
                        dot += queries[r, h, d] * page[j, lead + d]
                    flat[r, h * page_size + j] = dot
                for j in range(count, page_size):
                    flat[r, h * page_size + j] = np.float32(-1e30)
            for h in range(heads):
                peak = top[r, h]
                for j in range(page_size):
                    peak = max(peak, flat[r, h * page_size + j])
                shrink[r, h] = top[r, h] - peak
                top[r, h] = peak
                for j in range(page_size):
                    flat[r, h * page_size + j] -= peak
            for i in range(heads * page_size):
                flat[r, i] = exp(flat[r, i])
            for h in range(heads):
                shrink[r, h] = exp(shrink[r, h])
        for j in range(count):
            for d in range(width):
                page[j, d] = bf16(memory[at + half + j * width + d])
        for r in range(rows):
            for h in range(heads):
                lead = h // group * dim
                added = np.float32(0.0)
                for j in range(page_size):
                    added += flat[r, h * page_size + j]
                total[r, h] = total[r, h] * shrink[r, h] + added
                for d in range(dim):
                    acc[r, h, d] *= shrink[r, h]
                for j in range(count):
                    weight = flat[r, h * page_size + j]
                    for d in range(dim):
                        acc[r, h, d] += weight * page[j, lead + d]
    for r in range(rows):
        row, place = np.int64(pairs[2 * (first + r)]), np.int64(pairs[2 * (first + r) + 1])
        for h in range(heads):
            if place < 0:
                share = np.float32(1.0) / total[r, h]
                for d in range(dim):
                    to[row * out_stride + h * dim + d] = to_bf16(acc[r, h, d] * share)
            else:
                piece = (place * heads + h) * (dim + 2)
                for d in range(dim):
                    held[piece + d] = acc[r, h, d]
                held[piece + dim] = total[r, h]
                held[piece + dim + 1] = top[r, h]


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
def _kernels(kv_heads: int, group: int, dim: int, page_size: int) -> tuple[Shared, Shared]:
    """Items and merges for one shape of model and page: with loops of any length they take three
    times as long."""
    heads, most = kv_heads * group, MOST

    @Shared
    def items(address: Any) -> None:
        item = next_item(address)
        while item >= 0:
            _item(item, i64_at(address), kv_heads, group, dim, page_size, most)
            item = next_item(address)

    @Shared
    def merges(address: Any) -> None:
        item = next_item(address)
        while item >= 0:
            _merge(item, i64_at(address), heads, dim)
            item = next_item(address)

    return items, merges
