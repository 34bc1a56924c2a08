"""What rows of a step read together: a work item is a run of pages, and the rows that want it.

Sequences that begin alike hold the same pages (the prefix cache saw to that), and so do the tokens
of one chunk. What several rows share is read once for all of them (a cascade, as in FlashInfer's
multi-level attention); what a row has read in several items is merged by the log-sum-exp rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvcache.types import PageId

__all__ = ["Row", "Segment", "segments_of"]


class Row(NamedTuple):
    """A row of the step, a query: it sees the first `length` keys of `pages`."""

    row: int
    pages: Sequence[PageId]
    length: int


class Segment(NamedTuple):
    """Keys `[begin, end)` of the pages that all `rows` have there; `begin` is where a page is."""

    rows: list[Row]
    begin: int
    end: int


def segments_of(rows: Sequence[Row], page_size: int, *, share: int | None) -> list[Segment]:
    """Every key of every row, exactly once. Where that saves `share` keys or more, pages are read
    together; never, with None."""
    if share is None:
        return [Segment([row], 0, row.length) for row in rows]
    found: list[Segment] = []
    _walk(rows, 0, 0, page_size, share, found)
    return found


def _walk(
    rows: Sequence[Row], at: int, since: int, page_size: int, share: int, found: list[Segment]
) -> None:
    """`rows` have the same pages up to `at`, of which nothing is in a segment from `since` on."""
    by_page: dict[int, list[Row]] = {}
    for row in rows:
        if row.length // page_size > at:
            by_page.setdefault(row.pages[at], []).append(row)
        elif row.length > since * page_size:
            found.append(Segment([row], since * page_size, row.length))
    for alike in by_page.values():
        if len(alike) == 1:
            found.append(Segment(alike, since * page_size, alike[0].length))
            continue
        whole = [list(row.pages[at : row.length // page_size]) for row in alike]
        low, high = min(whole), max(whole)  # which part ways before any other two do
        end = at + next(
            (i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b),
            min(len(low), len(high)),
        )
        if (end - since) * page_size * (len(alike) - 1) >= share:
            found.append(Segment(alike, since * page_size, end * page_size))
            _walk(alike, end, end, page_size, share, found)
        else:
            _walk(alike, end, since, page_size, share, found)
