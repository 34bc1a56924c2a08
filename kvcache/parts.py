"""What rows of a step read together: a work item is a run of pages, and the rows that want it.

Sequences that begin alike hold the same pages (the prefix cache saw to that), and so do the tokens
of one chunk. What several rows share is read once for all of them (a cascade, as in FlashInfer's
multi-level attention); what is long is cut, so that threads may share it. What a row has read in
several items is merged by the log-sum-exp rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvcache.types import PageId

__all__ = ["Part", "Row", "parts_of"]


class Row(NamedTuple):
    """A query: it sees the first `length` keys of `pages`."""

    pages: Sequence[PageId]
    length: int


class Part(NamedTuple):
    """Keys `[begin, end)` of the pages that all `rows` have there; `begin` is where a page is."""

    rows: list[int]
    begin: int
    end: int


def parts_of(
    rows: Sequence[Row], page_size: int, *, share: int, most: int, work: int, least: int
) -> list[Part]:
    """Every key of every row, exactly once.

    Pages are read together where that saves `share` keys or more, by at most `most` rows. A part of
    more keys than `work` divided by its rows, and than `least`, is cut (between pages).
    """
    found: list[Part] = []
    _walk(list(range(len(rows))), 0, 0, rows, page_size, share, found)
    cut: list[Part] = []
    for part in found:
        for first in range(0, len(part.rows), most):
            together = part.rows[first : first + most]
            keys = max(work // len(together), least)
            step = -(-keys // page_size) * page_size
            for begin in range(part.begin, part.end, step):
                cut.append(Part(together, begin, min(begin + step, part.end)))
    return cut


def _walk(
    members: list[int],
    at: int,
    since: int,
    rows: Sequence[Row],
    page_size: int,
    share: int,
    found: list[Part],
) -> None:
    """`members` have the same pages up to `at`, of which nothing is in a part from `since` on."""
    by_page: dict[int, list[int]] = {}
    for member in members:
        row = rows[member]
        if row.length // page_size > at:
            by_page.setdefault(row.pages[at], []).append(member)
        elif row.length > since * page_size:
            found.append(Part([member], since * page_size, row.length))
    for alike in by_page.values():
        if len(alike) == 1:
            found.append(Part(alike, since * page_size, rows[alike[0]].length))
            continue
        whole = [list(rows[m].pages[at : rows[m].length // page_size]) for m in alike]
        low, high = min(whole), max(whole)  # which part ways before any other two do
        end = at + next(
            (i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b),
            min(len(low), len(high)),
        )
        if (end - since) * page_size * (len(alike) - 1) >= share:
            found.append(Part(alike, since * page_size, end * page_size))
            _walk(alike, end, end, rows, page_size, share, found)
        else:
            _walk(alike, end, since, rows, page_size, share, found)
