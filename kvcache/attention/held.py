"""The pages of a sequence that one holder has, and the partial results over them, as parts.

A sequence's pages may lie in the pools of several engines (Infinite-LLM's rBlocks). Each holder is
told which of its pages are which pages of the sequence, gets the queries, and returns parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from kvcache.attention.block_tree import BLOCK, Node
from kvcache.attention.partial import PartialAttention
from kvcache.attention.tiles import ABSENT
from kvcache.errors import BadRequest, KVIncomplete
from kvcache.sequences import PageIds
from kvcache.types import TokenPos

__all__ = [
    "HeldSpan",
    "Part",
    "Ranges",
    "check_cover",
    "check_queries",
    "check_span",
    "node_of",
    "part_of",
    "runs",
    "split_parts",
    "table_of",
]

Ranges = list[list[tuple[TokenPos, TokenPos]]]  # of each span: the keys [begin, end) of its parts


@dataclass(frozen=True, slots=True)
class HeldSpan:
    """Query rows `[row, row + count)` of one sequence, and the pages of it that are held here.

    The rows are the tokens at positions from `start`. A row sees the keys up to its own position.
    All keys of held pages before position `start + count` are present.
    """

    row: int
    start: TokenPos
    count: int
    pages: PageIds  # ids in this pool, in any order
    numbers: PageIds  # the key positions of page i are [numbers[i] * page_size, … + page_size)

    @property
    def end(self) -> int:
        """The position after the last row's, and so the number of keys that it sees."""
        return self.start + self.count


class Part(NamedTuple):
    """The partial result of the rows of a span over all keys at positions `[begin, end)`.

    Rows before `begin` have the neutral result.
    """

    begin: TokenPos
    end: TokenPos
    attention: PartialAttention

    @property
    def node(self) -> Node | None:
        """The node of the block tree that this part is; None if it is no node."""
        return node_of(self.begin, self.end)


def node_of(begin: int, end: int) -> Node | None:
    """Return the node of the block tree that has the keys `[begin, end)`; None if there is none."""
    first, blocks = begin // BLOCK, (end - begin) // BLOCK
    level = blocks.bit_length() - 1
    if blocks < 1 or blocks != 1 << level or first % blocks:
        return None
    node = Node(level, first >> level)
    return node if part_of(node) == (begin, end) else None


def check_cover(ranges: Sequence[tuple[TokenPos, TokenPos]], start: int, count: int) -> None:
    """Check that parts have the keys of rows at positions `[start, start + count)`, each once.

    `ranges` are their keys, in order. Raises `KVIncomplete` if keys before `start + count` are in
    no part, and `BadRequest` if keys are in two parts.
    """
    at = 0
    for begin, end in ranges:
        if end <= begin:
            raise BadRequest(f"a part has no keys: [{begin}, {end})")
        if begin < at:
            raise BadRequest(f"keys [{begin}, {min(end, at)}) are in two parts")
        if begin > at:
            break
        at = end
    if at < start + count:
        raise KVIncomplete(f"no part has keys from {at} on, of {start + count}")


def split_parts(rows: PartialAttention, ranges: Ranges, counts: Sequence[int]) -> list[list[Part]]:
    """Return the parts of each span as views of `rows`; see `HeldPlan.attend_rows`."""
    found: list[list[Part]] = []
    at = 0
    for parts, count in zip(ranges, counts, strict=True):
        found.append([])
        for begin, end in parts:
            some = slice(at, at + count)
            own = PartialAttention(rows.values[some], rows.top[some], rows.total[some])
            found[-1].append(Part(begin, end, own))
            at += count
    return found


def part_of(node: Node) -> tuple[TokenPos, TokenPos]:
    """Return the positions of a node's keys: from the first to after the last."""
    return TokenPos(node.first * BLOCK), TokenPos(node.end * BLOCK)


def table_of(span: HeldSpan, page_size: int) -> PageIds:
    """Return the page of each logical page up to the span's end: ABSENT where it is not held."""
    table: PageIds = np.full(-(-span.end // page_size), ABSENT, dtype=np.int32)
    seen = span.numbers < len(table)
    table[span.numbers[seen]] = span.pages[seen]
    return table


def runs(table: PageIds) -> list[tuple[int, int]]:
    """Return the maximal runs `[first, end)` of logical pages that are held."""
    held = np.concatenate(([False], table != ABSENT, [False]))
    borders = np.flatnonzero(held[1:] != held[:-1]).tolist()
    return list(zip(borders[::2], borders[1::2], strict=True))


def check_span(span: HeldSpan, page_size: int) -> None:
    """Raise `BadRequest` unless the span has rows, and its pages are different pages."""
    if span.row < 0 or span.start < 0 or span.count < 1:
        raise BadRequest(f"no rows: row {span.row}, start {span.start}, count {span.count}")
    if len(span.pages) != len(span.numbers):
        raise BadRequest(f"{len(span.pages)} pages with {len(span.numbers)} numbers")
    if page_size < 1 or BLOCK % page_size:
        raise BadRequest(f"page size {page_size} does not divide {BLOCK}")
    if len(span.numbers) and min(span.numbers.min(), span.pages.min()) < 0:
        raise BadRequest("a page or its number is negative")
    if len(np.unique(span.numbers)) < len(span.numbers):
        raise BadRequest("two pages with the same number")


def check_queries(
    spans: Sequence[HeldSpan], pages: torch.Tensor, q: torch.Tensor, group: int
) -> None:
    """Raise `BadRequest` unless `q` has the spans' rows, and the pool their pages.

    `q` is `[rows, heads, head_dim]`; `pages` is one layer's
    `[pages, 2, page_size, kv_heads, head_dim]`, of the same dtype.
    """
    if pages.dim() != 5 or q.dim() != 3 or q.shape[2] != pages.shape[4]:
        raise BadRequest(f"queries {list(q.shape)} do not fit pages {list(pages.shape)}")
    if q.shape[1] != group * pages.shape[3]:
        raise BadRequest(
            f"{q.shape[1]} query heads for {pages.shape[3]} KV heads in groups of {group}"
        )
    if q.dtype != pages.dtype:
        raise BadRequest(f"queries in {q.dtype} for pages in {pages.dtype}")
    for span in spans:
        if span.row + span.count > len(q):
            raise BadRequest(f"row {span.row + span.count - 1} of {len(q)} rows")
        if len(span.pages) and span.pages.max() >= len(pages):
            raise BadRequest(f"page {span.pages.max()} of {len(pages)} pages")
