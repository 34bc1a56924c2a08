"""Attention of tiles of query rows over absolute blocks of keys, bit-stable in float32.

The bits of a row must depend neither on the rest of the batch, nor on the chunks of the prompt, nor
on where the blocks lie. Hence:

- Keys are reduced in blocks of `BLOCK` absolute positions. Each block is complete: keys that are
  missing, or that a row may not see, are masked. The blocks are merged along the tree of
  `kvcache.attention.block_tree`.
- Matrix products have a multiple of `ROW_MULTIPLE` query rows. For other counts, torch's CPU
  kernels take another code path and return other bits.

How many blocks go through one product is free, since each is a matrix of its own in the batch:
`bmm` gives a matrix the same bits in every batch. So a decode takes several blocks at once, which
saves calls; a tile of many rows takes one, which keeps its scores in the processor's cache.

Query rows are grouped in tiles. All sequences that decode one token form one tile. A prefill chunk
is split into tiles of `QUERY_TILE` tokens of one sequence, which skips key blocks above the
causal diagonal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from kvcache.attention.block_tree import BLOCK, Node
from kvcache.attention.partial import LOWEST, SoftmaxSums, merge_into
from kvcache.pages import SCRATCH_PAGE
from kvcache.sequences import PageIds

__all__ = [
    "ABSENT",
    "QUERY_TILE",
    "ROW_MULTIPLE",
    "QueryRows",
    "Tile",
    "attend_tile",
    "by_rows",
    "tile_queries",
]

ROW_MULTIPLE = 4
QUERY_TILE = 64  # tokens
ABSENT = -1  # in a table: this page is not in the pool
PASS_BLOCKS = 8  # of all sequences, that go through one product
PASS_ROWS = 128  # padded query rows that do, over all of these blocks


@dataclass(frozen=True, slots=True)
class QueryRows:
    """Rows `[row, row + count)` of a step: tokens of one sequence, at positions from `start`."""

    row: int
    start: int
    count: int
    table: PageIds  # the page of each logical page of the sequence, or ABSENT

    @property
    def end(self) -> int:
        """The position after the last row's, and so the number of keys that it sees."""
        return self.start + self.count


class _Mask(NamedTuple):
    """What is masked in one block of a pass."""

    block: int  # of the pass
    hidden: torch.Tensor  # [sequences, 1, rows, BLOCK] bool: keys that a row may not see
    unwritten: list[list[int]]  # [sequence, begin, end]: its slots [begin, end) hold no key


class _Pass(NamedTuple):
    """Neighbouring blocks that the same sequences reach, for one product."""

    sequences: int  # how many of the tile's sequences reach these blocks; they come first
    blocks: int
    pages: torch.Tensor  # [blocks * sequences * pages per block] int64
    masks: list[_Mask]
    blind: bool  # whether a row sees no key of one of the blocks


class _Merge(NamedTuple):
    left: _Pass | _Merge
    right: _Pass | _Merge

    @property
    def sequences(self) -> int:
        return self.left.sequences


@dataclass(frozen=True, slots=True)
class Tile:
    """Queries of some sequences with `count` tokens each, and the blocks that they attend to."""

    rows: torch.Tensor  # [sequences * count] int64, indices of the step's rows
    sequences: int
    count: int
    work: _Pass | _Merge

    @classmethod
    def of(
        cls,
        sequences: Sequence[QueryRows],
        node: Node,
        *,
        page_size: int,
        group: int,
        device: torch.device,
    ) -> Tile:
        """Plan the attention over the blocks of `node`, for all layers.

        `sequences` have equal counts and come with the longest first, which reaches into `node`.
        `group` is the number of query heads per KV head, and `page_size` divides `BLOCK`.
        """
        count = sequences[0].count
        rows = [each.row + at for each in sequences for at in range(count)]
        planner = _Planner(sequences, page_size, _padded(count * group), group, device)
        work = planner.work(node)
        return cls(torch.tensor(rows, device=device), len(sequences), count, work)


class _Planner:
    def __init__(
        self,
        sequences: Sequence[QueryRows],
        page_size: int,
        rows: int,
        group: int,
        device: torch.device,
    ) -> None:
        self._page_size, self._device = page_size, device
        count, longest = sequences[0].count, sequences[0].end
        blocks, per_block = -(-longest // BLOCK), BLOCK // page_size
        self._starts = np.array([each.start for each in sequences])
        self._ends = self._starts + count
        # Row r of a sequence is query token r // group; padding rows repeat the last token.
        self._tokens = (np.arange(rows) // group).clip(max=count - 1)
        begins = np.arange(0, blocks * BLOCK, BLOCK)
        self._reach: list[int] = (self._ends > begins[:, None]).sum(1).tolist()
        tables = np.full((len(sequences), blocks * per_block), ABSENT, dtype=np.int64)
        for own, each in zip(tables, sequences, strict=True):
            some = each.table[: -(-each.end // page_size)]
            own[: len(some)] = some
        # [blocks, sequences, pages per block]
        pages = tables.reshape(len(sequences), blocks, per_block).swapaxes(0, 1)
        self._absent = pages == ABSENT
        self._pages = np.where(self._absent, SCRATCH_PAGE, pages)
        self._all_held = (~self._absent).all(2)

    def work(self, node: Node) -> _Pass | _Merge:
        """Plan the blocks of a node that the longest sequence reaches; there are some."""
        first, end = node.first, min(node.end, len(self._reach))
        reach = self._reach[first]
        blocks = (end - first) * reach
        small = blocks <= PASS_BLOCKS and blocks * len(self._tokens) <= PASS_ROWS
        if node.level == 0 or (small and self._reach[end - 1] == reach):
            return self._pass(first, end, reach)
        left, right = node.halves
        if right.first >= len(self._reach):
            return self.work(left)
        return _Merge(self.work(left), self.work(right))

    def _pass(self, first: int, end: int, reach: int) -> _Pass:
        masks = [
            self._mask(block - first, block, reach)
            for block in range(first, end)
            if self._starts[reach - 1] < (block + 1) * BLOCK - 1  # the least of those that reach
            or not self._all_held[block, :reach].all()
        ]
        blind = any(bool(mask.hidden.all(-1).any()) for mask in masks)
        pages = torch.from_numpy(self._pages[first:end, :reach].reshape(-1))
        return _Pass(reach, end - first, pages.to(self._device), masks, blind)

    def _mask(self, at: int, block: int, reach: int) -> _Mask:
        """Return the mask of a block, which is number `at` of its pass."""
        keys = np.arange(block * BLOCK, (block + 1) * BLOCK)
        absent = np.repeat(self._absent[block, :reach], self._page_size, 1)
        unwritten = absent | (keys >= self._ends[:reach, None])
        hidden = (keys > (self._starts[:reach, None] + self._tokens)[..., None]) | unwritten[
            :, None
        ]
        sequences, borders = np.nonzero(np.diff(unwritten, axis=1, prepend=False, append=False))
        slots = np.stack([sequences[::2], borders[::2], borders[1::2]], axis=1).tolist()
        return _Mask(at, torch.from_numpy(hidden)[:, None].to(self._device), slots)


def tile_queries(tile: Tile, q: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Return the tile's queries, scaled: `[sequences * kv_heads, padded rows, head_dim]` float32.

    `q` is `[rows, heads, head_dim]` of the whole step.
    """
    n, count, dim = tile.sequences, tile.count, q.shape[2]
    group = q.shape[1] // kv_heads
    grouped = q[tile.rows].view(n, count, kv_heads, group, dim).permute(0, 2, 1, 3, 4)
    queries = q.new_zeros((n, kv_heads, _padded(count * group), dim), dtype=torch.float32)
    queries[:, :, : count * group] = grouped.reshape(n, kv_heads, count * group, dim) * dim**-0.5
    return queries.view(n * kv_heads, -1, dim)


def attend_tile(tile: Tile, queries: torch.Tensor, pages: torch.Tensor) -> SoftmaxSums:
    """Return the partial results of a tile over its blocks.

    `queries` are those of `tile_queries`, and so are the first two dimensions of the result.
    `pages` is one layer's `[pages, 2, page_size, kv_heads, head_dim]`. Scores and sums are float32.
    """
    return _attend(tile.work, queries, pages)


def by_rows(tile: Tile, results: torch.Tensor, heads: int) -> torch.Tensor:
    """Return `[sequences * kv_heads, padded rows, …]` as `[rows, heads, …]`, as in `tile.rows`."""
    n, count, last = tile.sequences, tile.count, results.shape[-1]
    kv_heads = len(results) // n
    group = heads // kv_heads
    some = results.view(n, kv_heads, -1, last)[:, :, : count * group]
    some = some.reshape(n, kv_heads, count, group, last).permute(0, 2, 1, 3, 4)
    return some.reshape(n * count, heads, last)


def _attend(work: _Pass | _Merge, queries: torch.Tensor, pages: torch.Tensor) -> SoftmaxSums:
    if isinstance(work, _Pass):
        return _attend_pass(work, queries, pages)
    sums = _attend(work.left, queries, pages)
    right = _attend(work.right, queries, pages)
    reaching = len(right.top)  # sequences that end before these blocks keep what they have
    merge_into(SoftmaxSums(*(tensor[:reaching] for tensor in sums)), right)
    return sums


def _attend_pass(work: _Pass, queries: torch.Tensor, pages: torch.Tensor) -> SoftmaxSums:
    _, _, page_size, kv_heads, dim = pages.shape
    live, blocks = work.sequences, work.blocks
    heads, rows = live * kv_heads, queries.shape[1]
    kv = pages.index_select(0, work.pages).view(blocks * live, -1, 2, page_size, kv_heads, dim)
    kv = kv.permute(2, 0, 4, 1, 3, 5).reshape(2, blocks * heads, BLOCK, dim).float()
    keys, values = kv.unbind()
    queries = queries[:heads]
    if blocks > 1:
        queries = queries.expand(blocks, heads, rows, dim).reshape(blocks * heads, rows, dim)
    scores = torch.bmm(queries, keys.transpose(1, 2))
    for mask in work.masks:
        some = slice(mask.block * heads, (mask.block + 1) * heads)
        scores[some].view(live, kv_heads, rows, BLOCK).masked_fill_(mask.hidden, -torch.inf)
        # A reused page may hold any value, NaN included, and 0 * NaN is not 0.
        own = values[some].view(live, kv_heads, BLOCK, dim)
        for sequence, begin, end in mask.unwritten:
            own[sequence, :, begin:end].zero_()
    top = scores.amax(-1, keepdim=True)
    if work.blind:
        top.clamp_(min=LOWEST)  # −inf − −inf is NaN
    weights = scores.sub_(top).exp_()
    total = weights.sum(-1, keepdim=True)
    summed = torch.bmm(weights, values)
    if blocks == 1:
        return SoftmaxSums(summed, top, total)
    sums = SoftmaxSums(*(tensor.view(blocks, heads, rows, -1) for tensor in (summed, top, total)))
    step = 1
    while step < blocks:  # a level of the tree, all its pairs at once; a block without one waits
        right = SoftmaxSums(*(tensor[step :: 2 * step] for tensor in sums))
        pairs = len(right.top)
        merge_into(SoftmaxSums(*(tensor[:: 2 * step][:pairs] for tensor in sums)), right)
        step *= 2
    return SoftmaxSums(*(tensor[0] for tensor in sums))


def _padded(rows: int) -> int:
    return -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE
