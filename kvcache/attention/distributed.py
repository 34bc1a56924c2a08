"""DistAttention: attention where the pages are, and its exact merge (Infinite-LLM, section 4.2).

A holder of some pages of a sequence, the sequence's own engine or another, computes the partial
results of given queries over them (`StableHeldPlan`). The owner of the sequence merges the parts of
all holders (`combine`), and divides (`PartialAttention.output`).

In float32 the output has the same bits as the attention of one engine that holds all pages, in any
placement in which no absolute block of `BLOCK` keys is divided between holders. Both run the code
of `kvcache.attention.tiles`, and merge blocks along the tree of `kvcache.attention.block_tree`. A
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
    check_queries,
    check_span,
    part_of,
    runs,
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
from kvcache.errors import BadRequest, KVIncomplete
from kvcache.sequences import PageIds
from kvcache.types import TokenPos

__all__ = ["StableHeldPlan", "combine", "fold_parts"]


class _Piece(NamedTuple):
    """Keys that become one part: a node that is held whole, or a run of a divided block's pages."""

    begin: TokenPos
    end: TokenPos
    node: Node
    table: PageIds


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
        self._pieces: list[list[_Piece]] = []
        self._tiles: list[list[list[tuple[int, Tile]]]] = []  # of a span, of a tile of its rows
        for span in spans:
            check_span(span, page_size)
            pieces = _pieces(span, page_size)
            self._pieces.append(pieces)
            tiles = []
            for at in range(0, span.count, QUERY_TILE):
                count, start = min(QUERY_TILE, span.count - at), span.start + at
                tiles.append(
                    [
                        (
                            number,
                            Tile.of(
                                [QueryRows(span.row + at, start, count, piece.table)],
                                piece.node,
                                page_size=page_size,
                                group=group,
                                device=device,
                            ),
                        )
                        for number, piece in enumerate(pieces)
                        if piece.begin < start + count
                    ]
                )
            self._tiles.append(tiles)

    @property
    def part_ranges(self) -> list[list[tuple[TokenPos, TokenPos]]]:
        """See `HeldPlan.part_ranges`."""
        return [[(piece.begin, piece.end) for piece in pieces] for pieces in self._pieces]

    def attend(self, pages: torch.Tensor, q: torch.Tensor) -> list[list[Part]]:
        """See `HeldPlan.attend`; a part is a node of the block tree, or lies in one block."""
        check_queries(self._spans, pages, q, self._group)
        heads, dim, kv_heads = q.shape[1], q.shape[2], pages.shape[3]
        results = []
        for span, pieces, tiles in zip(self._spans, self._pieces, self._tiles, strict=True):
            found = [PartialAttention.neutral(span.count, heads, dim, pages.device) for _ in pieces]
            for some in tiles:
                if not some:
                    continue
                queries = tile_queries(some[0][1], q, kv_heads)  # the same for all pieces
                for number, tile in some:
                    sums = attend_tile(tile, queries, pages)
                    at = tile.rows - span.row
                    found[number].values[at] = by_rows(tile, sums.values, heads)
                    found[number].top[at] = by_rows(tile, sums.top, heads).squeeze(-1)
                    found[number].total[at] = by_rows(tile, sums.total, heads).squeeze(-1)
            results.append(
                [
                    Part(piece.begin, piece.end, attention)
                    for piece, attention in zip(pieces, found, strict=True)
                ]
            )
        return results


def combine(parts: Sequence[Part], *, start: TokenPos, count: int) -> PartialAttention:
    """Merge the parts of all holders for rows at positions `[start, start + count)` of a sequence.

    The order of `parts` does not matter. Raises `KVIncomplete` if keys before `start + count` are
    in no part, and `BadRequest` if keys are in two parts or a part is for other rows.
    """
    at = 0
    for part in sorted(parts, key=lambda part: part.begin):
        if part.end <= part.begin:
            raise BadRequest(f"a part has no keys: [{part.begin}, {part.end})")
        if part.begin < at:
            raise BadRequest(f"keys [{part.begin}, {min(part.end, at)}) are in two parts")
        if part.begin > at:
            break
        at = part.end
    if at < start + count:
        raise KVIncomplete(f"no part has keys from {at} on, of {start + count}")
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


def _pieces(span: HeldSpan, page_size: int) -> list[_Piece]:
    table = table_of(span, page_size)
    per_block = BLOCK // page_size
    whole, divided = [], []
    for first in range(0, len(table), per_block):
        absent = table[first : first + per_block] == ABSENT
        if not absent.any():
            whole.append(first // per_block)
        elif not absent.all():
            divided.append(first)
    pieces = [_Piece(*part_of(node), node, table) for node in nodes_of(whole)]
    for first in divided:
        for begin, end in runs(table[first : first + per_block]):
            own: PageIds = np.full(len(table), ABSENT, dtype=np.int32)
            own[first + begin : first + end] = table[first + begin : first + end]
            positions = TokenPos((first + begin) * page_size), TokenPos((first + end) * page_size)
            pieces.append(_Piece(*positions, Node(0, first // per_block), own))
    return pieces
