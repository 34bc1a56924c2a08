"""float32 attention on a CPU whose rows have the same bits however they are computed.

A work item is some query rows of one sequence, KV heads and all query heads that share them, over a
range of blocks of `KEYS` keys. Each block gives a partial result: the weighted values, the
highest score and the sum of the weights. They are merged in pairs, as binary digits carry: so a
range that is a node of a binary tree is merged along the tree, wherever it lies. All arithmetic is
that of `exact_f32`: a row has the same bits in a decode as in a prompt, with any other rows, and
on any processor that has the operations.

Keys and values of a block are packed first, keys as columns. What is packed for a missing key is
zero, and its weight is zero.

Importing this module compiles the kernel, which takes seconds the first time. Raises `ImportError`
where the processor does not have the operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvcache.kernels import exact_f32
from kvcache.kernels.exact_f32 import available, copy, multiply, prefetch, softmax, transpose
from kvcache.kernels.jit import (
    ParallelKernel,
    exact_jit,
    f32_at,
    f32_bits,
    f32_from_bits,
    i32_at,
    i64_at,
    inline_jit,
    next_item,
)
from kvcache.kernels.merge_results import is_attention, merge, merge_all, merge_rows

__all__ = ["KEYS", "BlockRun", "StableAttention", "is_attention", "merge", "merge_all"]

KEYS = exact_f32.KEYS  # of a block
QUERIES = 96  # query rows of an item, at most, but for the heads that share a KV head
PARALLEL_KEYS = 2048  # rows times keys from which waking other threads pays
LOWEST = np.float32(exact_f32.LOWEST)
FIELDS = 9  # of an item
LINE = 16  # numbers of a cache line
WIDTH, LANES = exact_f32.WIDTH, exact_f32.LANES

if not available():
    raise ImportError("this processor does not multiply and add in one operation")


class BlockRun(NamedTuple):
    """Query rows of one sequence, and the blocks of keys `[begin, end)` that they attend to."""

    row: int  # the first query row
    place: int  # of its result; those of the others follow
    start: int  # the position of the first row; a row sees keys up to its own position
    rows: int
    table: npt.NDArray[
        np.int32
    ]  # the page of each logical page; below 0 where it is not in the pool
    begin: int
    end: int


class StableAttention:
    """The attention of some rows, planned once for all layers."""

    def __init__(self, work: Sequence[BlockRun], kv_heads: int, group: int, page_size: int) -> None:
        """`group` is the number of query heads per KV head; `page_size` divides `KEYS`.

        Rows that see no key of their blocks are left out: nothing is written for them.
        """
        self._heads, self._group, self._page_size = kv_heads, group, page_size
        tokens, per_block = max(QUERIES // group, 1), KEYS // page_size
        items: list[tuple[int, ...]] = []
        tables: list[npt.NDArray[np.int32]] = []
        entries = cost = 0
        threads = torch.get_num_threads()
        # With fewer items, some threads would have none.
        heads = kv_heads if threads == 1 or len(work) >= 2 * threads else 1
        for row, place, start, rows, table, begin, end in work:
            first = begin * per_block
            some = table[first : min(end * per_block, -(-(start + rows) // page_size))]
            for at in range(0, rows, tokens):
                count = min(tokens, rows - at)
                last = min(end, -(-(start + at + count) // KEYS))
                if last > begin:
                    fields = (row + at, place + at, start + at, count, entries, begin, last)
                    items += [(*fields, head, heads) for head in range(0, kv_heads, heads)]
                    cost += count * (last - begin) * KEYS
            tables.append(some)
            entries += len(some)
        # The longest come first, so that all threads finish together.
        items.sort(key=lambda item: -item[3] * (item[6] - item[5]))
        self._items = np.array(items, dtype=np.int64).reshape(-1, FIELDS)
        self._table = np.concatenate(tables) if tables else np.empty(0, np.int32)
        self._parallel = cost * kv_heads >= PARALLEL_KEYS

    def attend(self, pages: torch.Tensor, q: torch.Tensor, out: torch.Tensor) -> None:
        """Write the attention of the rows to `out`, which is `[rows, heads, head_dim]` like `q`.

        `pages` is one layer's, `[pages, 2, page_size, kv_heads, head_dim]`. All are float32.
        """
        self._run(pages, q, out, 0, 0)

    def attend_parts(
        self, pages: torch.Tensor, q: torch.Tensor,
        values: torch.Tensor, top: torch.Tensor, total: torch.Tensor,
    ) -> None:  # fmt: skip
        """Write partial results: `[places, heads, head_dim]`, and `[places, heads]` twice."""
        self._run(pages, q, values, top.data_ptr(), total.data_ptr())

    def _run(
        self, pages: torch.Tensor, q: torch.Tensor, out: torch.Tensor, top: int, total: int
    ) -> None:
        dim = pages.shape[4]
        if q.stride(2) != 1 or q.stride(1) != dim:
            q = q.contiguous()
        parallel = self._parallel and len(self._items) > 1 and torch.get_num_threads() > 1
        run = _ATTEND.run_parallel if parallel else _ATTEND.run_serial
        run(
            len(self._items), q.data_ptr(), q.stride(0), pages.data_ptr(),
            pages.stride(0), pages.stride(1), self._items.ctypes.data, self._table.ctypes.data,
            out.data_ptr(), top, total, self._heads, self._group, dim, self._page_size,
            f32_bits(dim**-0.5),
        )  # fmt: skip


@inline_jit
def _attend(item: Any, a: Any) -> None:
    """Attend with some rows of one sequence and neighbouring KV heads: each block by all of them.

    A row of the pool has the heads side by side: one after the other they would wait for memory.
    """
    q, q_stride, items = f32_at(a[2]), a[3], i64_at(a[7])
    group, dim, scale = a[13], a[14], f32_from_bits(a[16])
    of = item * FIELDS
    row, place, start, count = items[of], items[of + 1], items[of + 2], items[of + 3]
    entry, begin, end, head, heads = (
        items[of + 4], items[of + 5], items[of + 6], items[of + 7], items[of + 8]
    )  # fmt: skip
    rows = count * group
    wide = (dim + WIDTH - 1) // WIDTH * WIDTH
    result = rows * (wide + 2) * 4  # bytes of a partial result: values, tops, sums
    levels = 2
    while (end - begin) >> levels:
        levels += 1
    stack = (levels + 1) * result  # of a head
    space = np.empty(
        KEYS * (dim + wide) * 4
        + wide * 4
        + rows * KEYS * 4
        + heads * (rows * dim * 4 + stack)
        + 3 * KEYS * 8
        + 64,
        np.uint8,
    )
    k_at = (space.ctypes.data + 63) // 64 * 64
    v_at = k_at + KEYS * dim * 4
    zeros_at = v_at + KEYS * wide * 4
    s_at = zeros_at + wide * 4
    where_at = s_at + rows * KEYS * 4  # addresses of the keys of a block, of the next one, …
    mine_at = where_at + 2 * KEYS * 8  # … and of a head's
    q_at = mine_at + KEYS * 8
    stack_at = q_at + heads * rows * dim * 4
    zeros = f32_at(zeros_at)
    for d in range(wide):
        zeros[d] = np.float32(0.0)
    for h in range(heads):
        queries = f32_at(q_at + h * rows * dim * 4)
        for t in range(count):
            for i in range(group * dim):
                element = q[(row + t) * q_stride + (head + h) * group * dim + i]
                queries[t * group * dim + i] = element * scale
    _find(where_at, zeros_at, begin, begin, end, head, entry, start + count, a)
    depth = 0  # of the stacks
    for block in range(begin, end):
        odd = (block - begin) % 2 * KEYS * 8
        here, ahead = where_at + odd, where_at + KEYS * 8 - odd
        _find(ahead, zeros_at, block + 1, begin, end, head, entry, start + count, a)
        first = block * KEYS
        seen = min(KEYS, start + count - first)
        for h in range(heads):
            _pack(here, ahead, mine_at, zeros_at, h, heads, k_at, v_at, seen, wide, a)
            _attend_block(
                q_at + h * rows * dim * 4, k_at, v_at, s_at, mine_at, zeros_at,
                stack_at + h * stack + depth * result, rows, start - first, seen, wide, a,
            )  # fmt: skip
        depth += 1
        done = block - begin
        while done & 1:
            done >>= 1
            depth -= 1
            for h in range(heads):
                left = stack_at + h * stack + (depth - 1) * result
                _merge(left, left + result, rows, wide)
    while depth > 1:
        depth -= 1
        for h in range(heads):
            left = stack_at + h * stack + (depth - 1) * result
            _merge(left, left + result, rows, wide)
    for h in range(heads):
        _write(stack_at + h * stack, rows, wide, place, head + h, a)
    space[0] = 0  # keeps the array alive up to here; all other accesses go by address


@exact_jit
def _pack(
    here: Any, ahead: Any, mine: Any, zeros: Any, h: Any, heads: Any, k_at: Any, v_at: Any,
    seen: Any, wide: Any, a: Any,
) -> None:  # fmt: skip
    """Pack keys and values of a block for head `h` of `heads`; prefetch a share of the next block.

    Keys become `[KEYS / WIDTH, dim, WIDTH]`, values `[wide / WIDTH, KEYS, WIDTH]`. `mine` receives
    the addresses of the head's keys; those of `here` are the first head's.
    """
    half, dim = a[6], a[14]
    offset = 4 * h * dim
    keys, values = f32_at(k_at), f32_at(v_at)
    first, following, own = i64_at(here), i64_at(ahead), i64_at(mine)
    whole, tail = dim // LANES * LANES, dim // WIDTH * WIDTH
    for j in range(KEYS):
        own[j] = first[j] + offset if first[j] != zeros else zeros
    for j in range(0, (seen + WIDTH - 1) // WIDTH * WIDTH, LANES):
        to = k_at + (j // WIDTH * dim * WIDTH + j % WIDTH) * 4
        if j // LANES % heads == h:
            for n in range(LANES):
                for d in range(0, heads * dim, LINE):
                    prefetch(following[j + n] + 4 * d)
        for d in range(0, whole, LANES):
            transpose(mine + 8 * j, 4 * d, to + 4 * WIDTH * d)
        for n in range(LANES):
            source = f32_at(own[j + n])
            for d in range(whole, dim):
                keys[((j + n) // WIDTH * dim + d) * WIDTH + (j + n) % WIDTH] = source[d]
    for j in range(seen):
        source_at = own[j] + 4 * half if own[j] != zeros else zeros
        if j % heads == h:
            for d in range(0, heads * dim, LINE):
                prefetch(following[j] + 4 * (half + d))
        for d in range(0, tail, WIDTH):
            copy(source_at + 4 * d, v_at + 4 * (d * KEYS + j * WIDTH))
        if tail < dim:
            source, to = f32_at(source_at), tail * KEYS + j * WIDTH
            for n in range(WIDTH):
                values[to + n] = source[tail + n] if tail + n < dim else np.float32(0.0)


@exact_jit
def _attend_block(
    q_at: Any, k_at: Any, v_at: Any, s_at: Any, mine: Any, zeros: Any, o_at: Any, rows: Any,
    start: Any, seen: Any, wide: Any, a: Any,
) -> None:  # fmt: skip
    """Write the partial result of some rows over a packed block to `o_at`.

    `start` is the position of the first row from the block's first key on.
    """
    group, dim, page_size = a[13], a[14], a[15]
    scores, where = f32_at(s_at), i64_at(mine)
    for j in range(0, seen, WIDTH):
        multiply(q_at, dim * 4, k_at + j * dim * 4, s_at + j * 4, KEYS * 4, rows, dim)
    top_at, total_at = o_at + rows * wide * 4, o_at + rows * (wide + 1) * 4
    tops, totals = f32_at(top_at), f32_at(total_at)
    for r in range(rows):
        limit = max(min(start + r // group + 1, seen), 0)
        for j in range(limit, KEYS):
            scores[r * KEYS + j] = LOWEST
        for j in range(0, limit, page_size):
            if where[j] == zeros:
                for n in range(j, min(j + page_size, limit)):
                    scores[r * KEYS + n] = LOWEST
        softmax(s_at + r * KEYS * 4, top_at + 4 * r, total_at + 4 * r)
        if tops[r] == LOWEST:  # no key: the weights were 1
            totals[r] = np.float32(0.0)
            for j in range(KEYS):
                scores[r * KEYS + j] = np.float32(0.0)
    for d in range(0, wide, WIDTH):
        multiply(s_at, KEYS * 4, v_at + d * KEYS * 4, o_at + d * 4, wide * 4, rows, seen)


@exact_jit
def _find(
    to: Any, zeros: Any, block: Any, begin: Any, end: Any, head: Any, entry: Any, length: Any,
    a: Any,
) -> None:  # fmt: skip
    """Write the addresses of a block's keys for a head; `zeros` for those that are not there."""
    heads, dim, page_size = a[12], a[14], a[15]
    table, where = i32_at(a[8]), i64_at(to)
    for slot in range(KEYS // page_size):
        first = slot * page_size
        page = np.int64(-1)
        if block < end and block * KEYS + first < length:
            page = np.int64(table[entry + ((block - begin) * KEYS + first) // page_size])
        for n in range(page_size):
            there = page >= 0 and block * KEYS + first + n < length
            place = a[4] + 4 * (page * a[5] + (n * heads + head) * dim)
            where[first + n] = place if there else zeros


@exact_jit
def _merge(left: Any, right: Any, rows: Any, wide: Any) -> None:
    """Merge two partial results of an item, at addresses, into the left one."""
    tops, totals = rows * wide * 4, rows * (wide + 1) * 4
    merge_rows(left, left + tops, left + totals, right, right + tops, right + totals, rows, wide)


@exact_jit
def _write(result: Any, rows: Any, wide: Any, place: Any, head: Any, a: Any) -> None:
    """Write the result of an item: the attention, or its values, tops and sums."""
    out, heads, group, dim = f32_at(a[9]), a[12], a[13], a[14]
    values, tops = f32_at(result), f32_at(result + rows * wide * 4)
    totals = f32_at(result + rows * (wide + 1) * 4)
    for r in range(rows):
        to = ((place + r // group) * heads + head) * group + r % group
        if a[10]:
            for d in range(dim):
                out[to * dim + d] = values[r * wide + d]
            f32_at(a[10])[to] = tops[r]
            f32_at(a[11])[to] = totals[r]
        else:
            for d in range(dim):
                # The sum of no products may be −0; it is +0 here.
                out[to * dim + d] = values[r * wide + d] / totals[r] + np.float32(0.0)


def _kernel() -> ParallelKernel:
    def attend(address: Any) -> None:
        item = next_item(address)
        while item >= 0:
            _attend(item, i64_at(address))
            item = next_item(address)

    return ParallelKernel(attend, exact=True)


_ATTEND = _kernel()
