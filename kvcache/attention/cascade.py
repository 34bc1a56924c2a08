"""Cascade planning: which query rows of a step read the same keys, and can read them once.

Sequences with a common prefix hold the same pages (by the prefix cache), and so do the tokens of
one chunk. Keys that several rows share are read once for all of them, as in FlashInfer's
multi-level cascade attention. The partial results of a row over several key ranges are merged by
their log-sum-exps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvcache.sequences import PageIds

__all__ = ["Row", "Segment", "segments_of"]

PAGE_ID_BYTES = 4


class Row(NamedTuple):
    """A query row of the step, which attends to the first `length` keys of `pages`."""

    row: int
    pages: PageIds
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
            by_page.setdefault(int(row.pages[at]), []).append(row)
        elif row.length > since * page_size:
            found.append(Segment([row], since * page_size, row.length))
    for sharing in by_page.values():
        if len(sharing) == 1:
            found.append(Segment(sharing, since * page_size, sharing[0].length))
            continue
        tables = [row.pages[at : row.length // page_size].tobytes() for row in sharing]
        # In lexicographic order, the first and the last table have the shortest common prefix.
        end = at + _common_pages(min(tables), max(tables))
        if (end - since) * page_size * (len(sharing) - 1) >= min_saving:
            found.append(Segment(sharing, since * page_size, end * page_size))
            _walk(sharing, end, end, page_size, min_saving, found)
        else:
            _walk(sharing, end, since, page_size, min_saving, found)


def _common_pages(one: bytes, other: bytes) -> int:
    """Return the length of the common prefix of two tables of int32 page ids."""
    count = min(len(one), len(other)) // PAGE_ID_BYTES
    differ = np.flatnonzero(
        np.frombuffer(one, np.int32, count) != np.frombuffer(other, np.int32, count)
    )
    return int(differ[0]) if differ.size else count
