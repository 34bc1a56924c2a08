"""bfloat16 attention of many query rows over the same pages, on CPUs with AVX-512 BF16.

This is FlashAttention on a CPU. A work item is a block of query rows of one KV head, with all query
heads that share it; it iterates over the keys in blocks of `KEYS`. Both products use register tiles
(`gemm_tile`). Scores, their running maximum and sums are float32. Keys and values are first packed
into the layout of the tiles, once for all items, from the pages in place.

Each row has its own limit of visible keys. So the same kernel serves a chunk of a prompt (causal)
and a prefix that several sequences share.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from kvcache.kernels import gemm_tile
from kvcache.kernels.avx512_bf16 import available
from kvcache.kernels.gemm_tile import multiply, multiply_add
from kvcache.kernels.jit import (
    ParallelKernel,
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
    u32_at,
)
from kvcache.kernels.segments import KVSegment

__all__ = ["PrefillAttention", "item_count", "kernels", "supports"]

KEYS = 128  # of a key block
QUERIES = 48  # query rows of an item, at most
TILE_WIDTH, TILE_ROWS = gemm_tile.WIDTH, gemm_tile.ROWS


def supports(group: int, dim: int) -> bool:
    """Return whether the processor has AVX-512 BF16 and `dim` is a multiple of the tile width."""
    return available() and dim % TILE_WIDTH == 0 and group <= QUERIES


def item_count(rows: int, kv_heads: int, group: int) -> int:
    """Return the number of work items of a segment with `rows` readers."""
    return kv_heads * -(-rows // (QUERIES // group))


class PrefillAttention:
    """The segments of a step with several rows, planned once for all layers."""

    def __init__(
        self, segments: Sequence[KVSegment], kv_heads: int, group: int, dim: int, page_size: int
    ) -> None:
        self._pack, self._attend = kernels(kv_heads, group, dim, page_size)
        self._scale = f32_bits(dim**-0.5)
        tokens = QUERIES // group
        entries = 0  # of the page table
        readers: list[tuple[int, int, int]] = []
        blocks: list[tuple[int, int, int]] = []  # first page in the table, first key, keys
        items: list[tuple[int, ...]] = []
        for segment_readers, pages, begin, end in segments:
            first = len(blocks)
            for at in range(begin, end, KEYS):
                blocks.append((entries, at - begin, min(KEYS, end - at)))
            # Later rows see more keys. They come first, so that all threads finish together.
            for head in range(kv_heads):
                for at in reversed(range(0, len(segment_readers), tokens)):
                    count = min(tokens, len(segment_readers) - at)
                    items.append((head, len(readers) + at, count, first, begin))
            entries += len(pages)
            readers += segment_readers
        self._table = np.concatenate([segment.pages for segment in segments])
        self._readers = np.array(readers, dtype=np.int32)
        self._blocks = np.array(blocks, dtype=np.int32)
        self._items = np.array(items, dtype=np.int32)
        self._packed = torch.empty(len(blocks) * kv_heads * 2 * KEYS * dim, dtype=torch.bfloat16)

    def attend(
        self, pages: torch.Tensor, q: torch.Tensor, out: torch.Tensor, partials: torch.Tensor,
        *, parallel: bool,
    ) -> None:  # fmt: skip
        """Attend over one layer's `pages`; see `DecodeAttention.attend`."""
        packed = self._packed.data_ptr()
        pack, attend = (
            kernel.run_parallel if parallel else kernel.run_serial
            for kernel in (self._pack, self._attend)
        )
        pack(
            len(self._blocks), pages.data_ptr(), pages.stride(0), pages.stride(1),
            self._table.ctypes.data, self._blocks.ctypes.data, packed,
        )  # fmt: skip
        attend(
            len(self._items), q.data_ptr(), q.stride(0), out.data_ptr(), out.stride(0),
            packed, self._items.ctypes.data, self._readers.ctypes.data, partials.data_ptr(),
            self._scale,
        )  # fmt: skip


@inline_jit
def _pack(item: int, a: Any, kv_heads: int, dim: int, page_size: int) -> None:
    """Pack one block of keys and values, with zeros beyond the last key.

    Keys become `[heads, KEYS / 64, dim / 2, 64, 2]`, values `[heads, dim / 64, KEYS / 2, 64, 2]`.
    """
    half = dim // 2
    size = KEYS * half  # pairs of a head's keys, or values
    memory, values = u32_at(a[2]), u16_at(a[2] + 2 * a[4])
    page_stride, table, blocks = a[3], i32_at(a[5]), i32_at(a[6])
    to = u32_at(a[7] + item * kv_heads * 2 * size * 4)
    first, begin, count = blocks[3 * item], blocks[3 * item + 1], blocks[3 * item + 2]
    where = np.empty(KEYS, np.int64)  # offset of each key's first element
    for j in range(count):
        at = begin + j
        page = np.int64(table[first + at // page_size])
        where[j] = page * page_stride + at % page_size * (kv_heads * dim)
    for head in range(kv_heads):
        k, v = head * 2 * size, head * 2 * size + size
        for j in range(count):
            at = where[j] // 2 + head * half
            place = k + j // TILE_WIDTH * (half * TILE_WIDTH) + j % TILE_WIDTH
            for d in range(half):
                to[place + d * TILE_WIDTH] = memory[at + d]
        for j in range(count, KEYS):
            place = k + j // TILE_WIDTH * (half * TILE_WIDTH) + j % TILE_WIDTH
            for d in range(half):
                to[place + d * TILE_WIDTH] = np.uint32(0)
        for pair in range(KEYS // 2):
            one, other = 2 * pair, 2 * pair + 1
            for part in range(dim // TILE_WIDTH):
                place = v + (part * (KEYS // 2) + pair) * TILE_WIDTH
                if other < count:
                    low = where[one] + head * dim + part * TILE_WIDTH
                    high = where[other] + head * dim + part * TILE_WIDTH
                    for d in range(TILE_WIDTH):
                        to[place + d] = np.uint32(values[low + d]) | (
                            np.uint32(values[high + d]) << np.uint32(16)
                        )
                elif one < count:
                    low = where[one] + head * dim + part * TILE_WIDTH
                    for d in range(TILE_WIDTH):
                        to[place + d] = np.uint32(values[low + d])
                else:
                    for d in range(TILE_WIDTH):
                        to[place + d] = np.uint32(0)


@inline_jit
def _attend(item: int, a: Any, kv_heads: int, group: int, dim: int) -> None:
    """Attend with a block of query rows of one KV head."""
    heads, size = kv_heads * group, KEYS * dim * 2  # size: bytes of a head's keys, or values
    q, q_stride, out, out_stride = u16_at(a[2]), a[3], u16_at(a[4]), a[5]
    packed, items, readers, partials = a[6], i32_at(a[7]), i32_at(a[8]), f32_at(a[9])
    scale = f32_from_bits(a[10])
    head, first, tokens = items[5 * item], items[5 * item + 1], items[5 * item + 2]
    block, start = np.int64(items[5 * item + 3]), items[5 * item + 4]
    rows = tokens * group
    padded_rows = (rows + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS
    # Scratch space by address: loops over it vectorize, and start at cache lines.
    space = np.empty(QUERIES * (4 * dim + 2 * dim + 4 * KEYS + 2 * KEYS + 4) + 64, np.uint8)
    o_at = (space.ctypes.data + 63) // 64 * 64
    q_at = o_at + QUERIES * dim * 4
    s_at = q_at + QUERIES * dim * 2
    w_at = s_at + QUERIES * KEYS * 4
    r_at = w_at + QUERIES * KEYS * 2
    queries, scores, weights = u16_at(q_at), f32_at(s_at), u16_at(w_at)
    acc, shrink = f32_at(o_at), f32_at(r_at)
    top = np.full(QUERIES, np.float32(-1e30), np.float32)
    total = np.zeros(QUERIES, np.float32)
    for i in range(QUERIES * dim):
        acc[i] = np.float32(0.0)
    for i in range(rows * dim, padded_rows * dim):
        queries[i] = np.uint16(0)
    for i in range(rows * KEYS, padded_rows * KEYS):
        weights[i] = np.uint16(0)
    for r in range(rows, padded_rows):
        shrink[r] = np.float32(1.0)
    most = 0
    for t in range(tokens):
        row = np.int64(readers[3 * (first + t)])
        most = max(most, readers[3 * (first + t) + 1])
        for i in range(group * dim):
            queries[t * group * dim + i] = q[row * q_stride + head * group * dim + i]
    for number in range((most - start + KEYS - 1) // KEYS):
        begin = start + number * KEYS
        seen = min(KEYS, most - begin)
        k = packed + ((block + number) * kv_heads + head) * 2 * size
        for part in range((seen + TILE_WIDTH - 1) // TILE_WIDTH):
            keys = k + part * (TILE_WIDTH * dim * 2)
            to_s = s_at + part * (TILE_WIDTH * 4)
            for r in range(0, padded_rows, TILE_ROWS):
                multiply(q_at + r * dim * 2, keys, to_s + r * KEYS * 4, dim, dim * 2, KEYS * 4)
        for r in range(rows):
            limit = readers[3 * (first + r // group) + 1] - begin
            of = r * KEYS
            for j in range(max(limit, 0), KEYS):
                scores[of + j] = np.float32(-1e30)
            peak = np.float32(-1e30)
            for j in range(KEYS):
                peak = fmax(peak, scores[of + j])
            peak = fmax(top[r], peak * scale)
            shrink[r] = exp(top[r] - peak)
            top[r] = peak
            for j in range(KEYS):
                scores[of + j] = exp(scores[of + j] * scale - peak)
            added = np.float32(0.0)
            for j in range(KEYS):
                added += scores[of + j]
                weights[of + j] = f32_to_bf16(scores[of + j])
            total[r] = total[r] * shrink[r] + added
        depth = (seen + 1) // 2 * 2
        for part in range(dim // TILE_WIDTH):
            values = k + size + part * (KEYS * TILE_WIDTH * 2)
            to_o = o_at + part * (TILE_WIDTH * 4)
            for r in range(0, padded_rows, TILE_ROWS):
                multiply_add(
                    w_at + r * KEYS * 2, values, to_o + r * dim * 4, depth, KEYS * 2, dim * 4,
                    r_at + r * 4,
                )  # fmt: skip
    for r in range(rows):
        t, h = first + r // group, head * group + r % group
        row, partial = np.int64(readers[3 * t]), np.int64(readers[3 * t + 2])
        if partial < 0:
            inverse = np.float32(1.0) / total[r]
            for d in range(dim):
                out[row * out_stride + h * dim + d] = f32_to_bf16(acc[r * dim + d] * inverse)
        else:
            at = (partial * heads + h) * (dim + 2)
            for d in range(dim):
                partials[at + d] = acc[r * dim + d]
            partials[at + dim] = total[r]
            partials[at + dim + 1] = top[r]
    space[0] = 0  # keeps the array alive up to here; all other accesses go by address


@cache
def kernels(
    kv_heads: int, group: int, dim: int, page_size: int
) -> tuple[ParallelKernel, ParallelKernel]:
    """Return the kernels that pack a key block and attend with a query block, for one model."""

    @ParallelKernel
    def pack(address: Any) -> None:
        item = next_item(address)
        while item >= 0:
            _pack(item, i64_at(address), kv_heads, dim, page_size)
            item = next_item(address)

    @ParallelKernel
    def attend(address: Any) -> None:
        item = next_item(address)
        while item >= 0:
            _attend(item, i64_at(address), kv_heads, group, dim)
            item = next_item(address)

    return pack, attend
