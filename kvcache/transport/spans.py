"""What a range of positions is in pages, on two sides whose pages lie differently."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvcache.types import PageId

__all__ = ["PageSpan", "page_spans"]


class PageSpan(NamedTuple):
    """`pages` pages from `source` on go to those from `target` on; of each the slots `[lo, hi)`,
    which are all of them if there is more than one page."""

    source: PageId
    target: PageId
    pages: int
    lo: int
    hi: int


def page_spans(
    source_pages: Sequence[PageId],
    target_pages: Sequence[PageId],
    target_first: int,
    size: int,
    begin: int,
    end: int,
) -> Iterator[PageSpan]:
    """What to copy for positions `[begin, end)`, with pages of `size` tokens.

    `source_pages[i]` holds the positions from `i * size`; `target_pages[0]` those from
    `target_first * size`. A position's slot in its page is the same on both sides. Full pages that
    are consecutive on both sides are one span.
    """
    at = begin
    while at < end:
        index = at // size
        source, target = source_pages[index], target_pages[index - target_first]
        lo, hi = at % size, min(size, at % size + end - at)
        count = 1
        if hi - lo == size:
            while (
                end - at >= (count + 1) * size
                and source_pages[index + count] == source + count
                and target_pages[index + count - target_first] == target + count
            ):
                count += 1
        yield PageSpan(source, target, count, lo, hi)
        at += count * (hi - lo)
