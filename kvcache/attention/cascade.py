"""Cascade planning: which query rows of a step read the same keys, and can read them once.

Sequences with a common prefix hold the same pages (by the prefix cache), and so do the tokens of
one chunk. Keys that several rows share are read once for all of them, as in FlashInfer's
multi-level cascade attention. The partial results of a row over several key ranges are merged by
their log-sum-exps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvcache.types import PageId

__all__ = ["Row", "Segment", "segments_of"]


class Row(NamedTuple):
    """A query row of the step, which attends to the first `length` keys of `pages`."""

    row: int
    pages: Sequence[PageId]
    length: int


class Segment(NamedTuple):
    """Keys `[begin, end)`, in pages that all `rows` share; `begin` is a page boundary."""

    rows: list[Row]
    begin: int
    end: int


def segments_of(rows: Sequence[Row], page_size: int, *, min_saving: int | None) -> list[Segment]:
    """Return ranges that cover every key of every row exactly once.

    Rows share a range where that saves reading `min_saving` keys or more; with None, they never do.
    """
    if min_saving is None:
        return [Segment([row], 0, row.length) for row in rows]
    found: list[Segment] = []
    _walk(rows, 0, 0, page_size, min_saving, found)
    return found


def _walk(
    rows: Sequence[Row], at: int, since: int, page_size: int, min_saving: int, found: list[Segment]
) -> None:
    """Add the ranges of `rows` from page index `since` on to `found`.

    The rows have equal pages before index `at`.
    """
    by_page: dict[int, list[Row]] = {}
    for row in rows:
        if row.length // page_size > at:
            by_page.setdefault(row.pages[at], []).append(row)
        elif row.length > since * page_size:
            found.append(Segment([row], since * page_size, row.length))
    for sharing in by_page.values():
        if len(sharing) == 1:
            found.append(Segment(sharing, since * page_size, sharing[0].length))
            continue
        full_pages = [list(row.pages[at : row.length // page_size]) for row in sharing]
        # In lexicographic order, the first and the last list have the shortest common prefix.
        low, high = min(full_pages), max(full_pages)
        end = at + next(
            (i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b),
            min(len(low), len(high)),
        )
        if (end - since) * page_size * (len(sharing) - 1) >= min_saving:
            found.append(Segment(sharing, since * page_size, end * page_size))
            _walk(sharing, end, end, page_size, min_saving, found)
        else:
            _walk(sharing, end, since, page_size, min_saving, found)
