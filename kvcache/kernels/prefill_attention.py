"""Attention in bfloat16 of many rows over the same pages, on processors with AVX-512 BF16.

FlashAttention on a CPU: a work item is a block of query rows of one KV head, those of all query
heads that share it, and goes over the keys in blocks of `KEYS`. Both products are tiles
(`tile.py`); scores, their running maximum and sums are in float32. Keys and values are first laid
out as tiles want them, once for all items: that reads the pages where they lie.

What a row sees ends at its own limit, so this is a chunk of a prompt (causal), or what several
sequences have in common.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from kvcache.kernels import gemm_tile as tile
from kvcache.kernels.avx512_bf16 import available
from kvcache.kernels.gemm_tile import multiply, multiply_add
from kvcache.kernels.jit import (
    Shared,
    exp,
    f32,
    f32_at,
    f32_bits,
    i32_at,
    i64_at,
    inlined,
    larger,
    next_item,
    to_bf16,
    u16_at,
    u32_at,
)
from kvcache.kernels.segments import KVSegment

__all__ = ["Many", "fits", "items", "kernels"]

KEYS = 128  # of a block
BLOCK = 48  # query rows of an item
TILE, TALL = tile.WIDTH, tile.ROWS


def fits(group: int, dim: int) -> bool:
    """Whether a model's heads are made of whole tiles, and the processor has them."""
    return available() and dim % TILE == 0 and group <= BLOCK


def items(rows: int, kv_heads: int, group: int) -> int:
    """Work items that the readers of one run of pages are."""
    return kv_heads * -(-rows // (BLOCK // group))


class Many:
    """All such rows of a step, planned for all layers."""

    def __init__(
        self, reads: Sequence[KVSegment], kv_heads: int, group: int, dim: int, page_size: int
    ) -> None:
        self._pack, self._attend = kernels(kv_heads, group, dim, page_size)
        self._scale = f32_bits(dim**-0.5)
        tokens = BLOCK // group
        entries = 0  # of the page table
        readers: list[tuple[int, int, int]] = []
        blocks: list[tuple[int, int, int]] = []  # pages from, keys from, keys
        work: list[tuple[int, ...]] = []
        for mine, pages, begin, end in reads:
            first = len(blocks)
            for at in range(begin, end, KEYS):
                blocks.append((entries, at - begin, min(KEYS, end - at)))
            # The last rows see most: they come first, so that all threads end together.
            for head in range(kv_heads):
                for at in reversed(range(0, len(mine), tokens)):
                    count = min(tokens, len(mine) - at)
                    work.append((head, len(readers) + at, count, first, begin))
            entries += len(pages)
            readers += mine
        self._table = np.concatenate([segment.pages for segment in reads])
        self._readers = np.array(readers, dtype=np.int32)
        self._blocks = np.array(blocks, dtype=np.int32)
        self._items = np.array(work, dtype=np.int32)
        self._packed = torch.empty(len(blocks) * kv_heads * 2 * KEYS * dim, dtype=torch.bfloat16)

    def attend(
        self, pages: torch.Tensor, q: torch.Tensor, out: torch.Tensor, pieces: torch.Tensor,
        *, together: bool,
    ) -> None:  # fmt: skip
        """Over one layer's `pages`, `[pages, 2, page_size, kv_heads, head_dim]`; `q` and `out` are
        `[rows, heads, head_dim]`, `pieces` `[places, heads, head_dim + 2]` float32."""
        packed = self._packed.data_ptr()
        pack, attend = (
            kernel.together if together else kernel.alone for kernel in (self._pack, self._attend)
        )
        pack(
            len(self._blocks), pages.data_ptr(), pages.stride(0), pages.stride(1),
            self._table.ctypes.data, self._blocks.ctypes.data, packed,
        )  # fmt: skip
        attend(
            len(self._items), q.data_ptr(), q.stride(0), out.data_ptr(), out.stride(0),
            packed, self._items.ctypes.data, self._readers.ctypes.data, pieces.data_ptr(),
            self._scale,
        )  # fmt: skip


@inlined
def _pack(item: int, a: Any, kv_heads: int, dim: int, page_size: int) -> None:
    """A block of keys as `[heads, KEYS / 64, dim / 2, 64, 2]`, of values as
    `[heads, dim / 64, KEYS / 2, 64, 2]`; zeros where there are none."""
    half = dim // 2
    size = KEYS * half  # of a head's keys, or values, in pairs
    memory, values = u32_at(a[2]), u16_at(a[2] + 2 * a[4])
    page_stride, table, what = a[3], i32_at(a[5]), i32_at(a[6])
    to = u32_at(a[7] + item * kv_heads * 2 * size * 4)
    first, begin, count = what[3 * item], what[3 * item + 1], what[3 * item + 2]
    where = np.empty(KEYS, np.int64)  # of a key's first number
    for j in range(count):
        at = begin + j
        page = np.int64(table[first + at // page_size])
        where[j] = page * page_stride + at % page_size * (kv_heads * dim)
    for head in range(kv_heads):
        k, v = head * 2 * size, head * 2 * size + size
        for j in range(count):
            at = where[j] // 2 + head * half
            place = k + j // TILE * (half * TILE) + j % TILE
            for d in range(half):
                to[place + d * TILE] = memory[at + d]
        for j in range(count, KEYS):
            place = k + j // TILE * (half * TILE) + j % TILE
            for d in range(half):
                to[place + d * TILE] = np.uint32(0)
        for pair in range(KEYS // 2):
            one, other = 2 * pair, 2 * pair + 1
            for part in range(dim // TILE):
                place = v + (part * (KEYS // 2) + pair) * TILE
                if other < count:
                    low = where[one] + head * dim + part * TILE
                    high = where[other] + head * dim + part * TILE
                    for d in range(TILE):
                        to[place + d] = np.uint32(values[low + d]) | (
                            np.uint32(values[high + d]) << np.uint32(16)
                        )
                elif one < count:
                    low = where[one] + head * dim + part * TILE
                    for d in range(TILE):
                        to[place + d] = np.uint32(values[low + d])
                else:
                    for d in range(TILE):
                        to[place + d] = np.uint32(0)


@inlined
def _attend(item: int, a: Any, kv_heads: int, group: int, dim: int) -> None:
    """A block of rows of one KV head."""
    heads, size = kv_heads * group, KEYS * dim * 2  # bytes of a head's keys, or values
    asked, q_stride, to, out_stride = u16_at(a[2]), a[3], u16_at(a[4]), a[5]
    packed, what, readers, held, scale = a[6], i32_at(a[7]), i32_at(a[8]), f32_at(a[9]), f32(a[10])
    head, first, tokens = what[5 * item], what[5 * item + 1], what[5 * item + 2]
    block, start = np.int64(what[5 * item + 3]), what[5 * item + 4]
    rows = tokens * group
    tall = (rows + TALL - 1) // TALL * TALL
    # Worked on by addresses: loops are vectors then, and begin where a cache line does.
    space = np.empty(BLOCK * (4 * dim + 2 * dim + 4 * KEYS + 2 * KEYS + 4) + 64, np.uint8)
    o_at = (space.ctypes.data + 63) // 64 * 64
    q_at = o_at + BLOCK * dim * 4
    s_at = q_at + BLOCK * dim * 2
    w_at = s_at + BLOCK * KEYS * 4
    r_at = w_at + BLOCK * KEYS * 2
    queries, scores, weights = u16_at(q_at), f32_at(s_at), u16_at(w_at)
    acc, shrink = f32_at(o_at), f32_at(r_at)
    top = np.full(BLOCK, np.float32(-1e30), np.float32)
    total = np.zeros(BLOCK, np.float32)
    for i in range(BLOCK * dim):
        acc[i] = np.float32(0.0)
    for i in range(rows * dim, tall * dim):
        queries[i] = np.uint16(0)
    for i in range(rows * KEYS, tall * KEYS):
        weights[i] = np.uint16(0)
    for r in range(rows, tall):
        shrink[r] = np.float32(1.0)
    most = 0
    for t in range(tokens):
        row = np.int64(readers[3 * (first + t)])
        most = max(most, readers[3 * (first + t) + 1])
        for i in range(group * dim):
            queries[t * group * dim + i] = asked[row * q_stride + head * group * dim + i]
    for number in range((most - start + KEYS - 1) // KEYS):
        begin = start + number * KEYS
        seen = min(KEYS, most - begin)
        k = packed + ((block + number) * kv_heads + head) * 2 * size
        for part in range((seen + TILE - 1) // TILE):
            keys = k + part * (TILE * dim * 2)
            to_s = s_at + part * (TILE * 4)
            for r in range(0, tall, TALL):
                multiply(q_at + r * dim * 2, keys, to_s + r * KEYS * 4, dim, dim * 2, KEYS * 4)
        for r in range(rows):
            limit = readers[3 * (first + r // group) + 1] - begin
            of = r * KEYS
            for j in range(max(limit, 0), KEYS):
                scores[of + j] = np.float32(-1e30)
            peak = np.float32(-1e30)
            for j in range(KEYS):
                peak = larger(peak, scores[of + j])
            peak = larger(top[r], peak * scale)
            shrink[r] = exp(top[r] - peak)
            top[r] = peak
            for j in range(KEYS):
                scores[of + j] = exp(scores[of + j] * scale - peak)
            added = np.float32(0.0)
            for j in range(KEYS):
                added += scores[of + j]
                weights[of + j] = to_bf16(scores[of + j])
            total[r] = total[r] * shrink[r] + added
        depth = (seen + 1) // 2 * 2
        for part in range(dim // TILE):
            values = k + size + part * (KEYS * TILE * 2)
            to_o = o_at + part * (TILE * 4)
            for r in range(0, tall, TALL):
                multiply_add(
                    w_at + r * KEYS * 2, values, to_o + r * dim * 4, depth, KEYS * 2, dim * 4,
                    r_at + r * 4,
                )  # fmt: skip
    for r in range(rows):
        t, h = first + r // group, head * group + r % group
        row, place = np.int64(readers[3 * t]), np.int64(readers[3 * t + 2])
        if place < 0:
            share = np.float32(1.0) / total[r]
            for d in range(dim):
                to[row * out_stride + h * dim + d] = to_bf16(acc[r * dim + d] * share)
        else:
            piece = (place * heads + h) * (dim + 2)
            for d in range(dim):
                held[piece + d] = acc[r * dim + d]
            held[piece + dim] = total[r]
            held[piece + dim + 1] = top[r]
    space[0] = 0  # which keeps it until here


@cache
def kernels(kv_heads: int, group: int, dim: int, page_size: int) -> tuple[Shared, Shared]:
    """What packs a block, and what attends with a block of rows, for one shape of model."""

    @Shared
    def packs(address: Any) -> None:
        item = next_item(address)
        while item >= 0:
            _pack(item, i64_at(address), kv_heads, dim, page_size)
            item = next_item(address)

    @Shared
    def attends(address: Any) -> None:
        item = next_item(address)
        while item >= 0:
            _attend(item, i64_at(address), kv_heads, group, dim)
            item = next_item(address)

    return packs, attends
