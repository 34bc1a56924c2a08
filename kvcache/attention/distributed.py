"""DistAttention: attention where the pages are, and its exact merge (Infinite-LLM, section 4.2).

A holder of some pages of a sequence, the sequence's own engine or another, computes the partial
results of given queries over them (`StableHeldPlan`). The owner of the sequence merges the parts of
all holders (`combine`), and divides (`PartialAttention.output`).

In float32 the output has the same bits as the attention of one engine that holds all pages, in any
placement in which no absolute block of `BLOCK` keys is divided between holders. Both run the same
code, that of `kvcache.attention.tiles` or the kernel of `kvcache.kernels.stable_attention`, and
merge blocks along the tree of `kvcache.attention.block_tree`. A
block that is divided makes parts that are no nodes of the tree; the output is then equal up to
rounding. So lend KV in whole blocks: an rBlock is `BLOCK` tokens, aligned.

What travels, per query row and layer, for `H` heads of dimension `d` and elements of `b` bytes:

- To a holder: the query, `H·d·b` bytes.
- Back: for each part, `H·(4d + 8)` bytes: `o`, `m` and `l` in float32. A holder of `n` neighbouring
  blocks returns one part per node that it holds whole: at most `2·log₂ n`, and one if they are a
  node. Pages of divided blocks make a part for each run of them.

With SmolLM2 (H = 9, d = 64) a query is 2,304 bytes in float32, and a part 2,376. Its layer's KV is
1,536 bytes per token: 196,608 per block, and so 83 times a part.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from kvcache.attention.block_tree import BLOCK, Node, fold, nodes_of, root
from kvcache.attention.held import (
    HeldSpan,
    Part,
    Ranges,
    check_cover,
    check_queries,
    check_span,
    part_of,
    runs,
    split_parts,
    table_of,
)
from kvcache.attention.partial import PartialAttention
from kvcache.attention.tiles import (
    ABSENT,
    QUERY_TILE,
    QueryRows,
    Tile,
    attend_tile,
    by_rows,
    tile_queries,
)
from kvcache.errors import BadRequest
from kvcache.sequences import PageIds
from kvcache.types import TokenPos

__all__ = ["Piece", "StableHeldPlan", "combine", "fold_parts", "pieces_of"]


class Piece(NamedTuple):
    """Keys that become one part: a node that is held whole, or a run of a divided block's pages."""

    begin: TokenPos
    end: TokenPos
    node: Node
    table: PageIds


class _Job(NamedTuple):
    """Query rows and a part's keys, for one or more sequences."""

    queries: tuple[tuple[int, int], ...]  # first rows and counts, by which the queries are found
    tile: Tile
    places: torch.Tensor  # of the tile's rows in the result


class StableHeldPlan:
    """Partial results over held pages, planned once from a step's spans and run in every layer."""

    def __init__(
        self, spans: Sequence[HeldSpan], *, page_size: int, group: int, device: torch.device
    ) -> None:
        """`group` is the number of query heads per KV head.

        Raises `BadRequest` for a span without rows, pages that are not told apart, or a page size
        that does not divide `BLOCK`.
        """
        self._spans, self._group = list(spans), group
        self.part_ranges: Ranges = []
        self.rows = 0  # of the result
        jobs: list[tuple[Node, list[tuple[int, QueryRows]]]] = []
        decodes: dict[Node, list[tuple[int, QueryRows]]] = {}  # as one tile, as on one engine
        for span in spans:
            check_span(span, page_size)
            pieces = pieces_of(span, page_size)
            self.part_ranges.append([(piece.begin, piece.end) for piece in pieces])
            for begin, end, node, table in pieces:
                for at in range(0, span.count, QUERY_TILE):
                    count, start = min(QUERY_TILE, span.count - at), span.start + at
                    job = self.rows + at, QueryRows(span.row + at, start, count, table)
                    if span.count == 1 and part_of(node) == (begin, end):
                        decodes.setdefault(node, []).append(job)
                    elif begin < start + count:
                        jobs.append((node, [job]))
                self.rows += span.count
        for node, some in decodes.items():
            jobs.append((node, sorted(some, key=lambda each: -each[1].start)))
        self._jobs: list[_Job] = []
        self._queries: dict[tuple[tuple[int, int], ...], Tile] = {}  # a tile with these rows
        for node, some in jobs:
            rows = [each for _, each in some]
            tile = Tile.of(rows, node, page_size=page_size, group=group, device=device)
            places = np.concatenate([np.arange(at, at + each.count) for at, each in some])
            key = tuple((each.row, each.count) for each in rows)
            self._queries.setdefault(key, tile)
            self._jobs.append(_Job(key, tile, torch.from_numpy(places).to(device)))

    def attend(self, pages: torch.Tensor, q: torch.Tensor) -> list[list[Part]]:
        """See `HeldPlan.attend`; a part is a node of the block tree, or lies in one block."""
        rows = self.attend_rows(pages, q)
        return split_parts(rows, self.part_ranges, [span.count for span in self._spans])

    def attend_rows(
        self, pages: torch.Tensor, q: torch.Tensor, into: PartialAttention | None = None
    ) -> PartialAttention:
        """See `HeldPlan.attend_rows`."""
        check_queries(self._spans, pages, q, self._group)
        heads, dim, kv_heads = q.shape[1], q.shape[2], pages.shape[3]
        result = into or PartialAttention.empty(self.rows, heads, dim, pages.device)
        result.fill_neutral()
        queries = {key: tile_queries(tile, q, kv_heads) for key, tile in self._queries.items()}
        for key, tile, places in self._jobs:
            sums = attend_tile(tile, queries[key], pages)
            result.values[places] = by_rows(tile, sums.values, heads)
            result.top[places] = by_rows(tile, sums.top, heads).squeeze(-1)
            result.total[places] = by_rows(tile, sums.total, heads).squeeze(-1)
        return result


def combine(parts: Sequence[Part], *, start: TokenPos, count: int) -> PartialAttention:
    """Merge the parts of all holders for rows at positions `[start, start + count)` of a sequence.

    The order of `parts` does not matter. Raises `KVIncomplete` if keys before `start + count` are
    in no part, and `BadRequest` if keys are in two parts or a part is for other rows.
    """
    ordered = sorted(parts, key=lambda part: part.begin)
    check_cover([(part.begin, part.end) for part in ordered], start, count)
    _, heads, dim = parts[0].attention.values.shape
    return fold_parts(
        parts, PartialAttention.neutral(count, heads, dim, parts[0].attention.top.device)
    )


def fold_parts(parts: Iterable[Part], neutral: PartialAttention) -> PartialAttention:
    """Merge parts that do not overlap; `neutral` if there are none.

    Nodes of the block tree are merged along it, then the other parts in the order of their keys.
    Raises `BadRequest` if a part is for other rows or heads than `neutral`.
    """
    known: dict[Node, PartialAttention] = {}
    others = []
    for part in sorted(parts, key=lambda part: part.begin):
        if part.attention.values.shape != neutral.values.shape:
            raise BadRequest(
                f"a part is {list(part.attention.values.shape)}, not {list(neutral.values.shape)}"
            )
        node = part.node
        if node is None:
            others.append(part.attention)
        else:
            known[node] = part.attention
    top = root(max((node.end for node in known), default=0))
    merged = fold(top, known, PartialAttention.merge)
    for other in others:
        merged = other if merged is None else merged.merge(other)
    return neutral if merged is None else merged


def pieces_of(span: HeldSpan, page_size: int) -> list[Piece]:
    """Return the parts of a span's held pages: nodes of the block tree, then divided blocks."""
    table = table_of(span, page_size)
    per_block = BLOCK // page_size
    # The context may be far longer than what is held of it, so only held blocks are looked at.
    firsts = np.arange(0, len(table), per_block)
    held = np.add.reduceat(table != ABSENT, firsts, dtype=np.int64)
    sizes = np.minimum(len(table) - firsts, per_block)
    whole = (firsts[held == sizes] // per_block).tolist()
    divided = firsts[(held > 0) & (held < sizes)].tolist()
    pieces = [Piece(*part_of(node), node, table) for node in nodes_of(whole)]
    for first in divided:
        for begin, end in runs(table[first : first + per_block]):
            own: PageIds = np.full(len(table), ABSENT, dtype=np.int32)
            own[first + begin : first + end] = table[first + begin : first + end]
            positions = TokenPos((first + begin) * page_size), TokenPos((first + end) * page_size)
            pieces.append(Piece(*positions, Node(0, first // per_block), own))
    return pieces
