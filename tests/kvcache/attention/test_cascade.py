"""Shared segments cover every key of every row exactly once."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvcache.attention.cascade import Row, Segment, segments_of

PAGE = 4


def row_of(row: int, pages: list[int], length: int) -> Row:
    return Row(row, np.array(pages, dtype=np.int32), length)


@st.composite
def rows(draw: st.DrawFn) -> list[Row]:
    """Page tables with common prefixes, and lengths that end anywhere."""
    tables = draw(st.lists(st.lists(st.integers(0, 1), min_size=6, max_size=6), max_size=6))
    return [
        row_of(
            row, [2 * at + page for at, page in enumerate(table)], draw(st.integers(1, 6 * PAGE))
        )
        for row, table in enumerate(tables)
    ]


@given(rows(), st.none() | st.integers(0, 30))
def test_segments_cover_every_key_of_every_row_once(rows: list[Row], share: int | None) -> None:
    seen = set()
    for part in segments_of(rows, PAGE, min_saving=share):
        assert part.begin % PAGE == 0
        for row in part.rows:
            for key in range(part.begin, part.end):
                assert row.pages[key // PAGE] == part.rows[0].pages[key // PAGE]
                assert (row.row, key) not in seen
                seen.add((row.row, key))
    assert seen == {(row.row, key) for row in rows for key in range(row.length)}


def numbers(parts: list[Segment]) -> list[tuple[list[int], int, int]]:
    return sorted(([row.row for row in rows], begin, end) for rows, begin, end in parts)


def test_shared_pages_are_read_once() -> None:
    first, second, third = [1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6, 7]
    rows = [row_of(0, first, 14), row_of(1, second, 16), row_of(2, third, 9)]
    assert numbers(segments_of(rows, PAGE, min_saving=1)) == [
        ([0], 12, 14),
        ([0, 1], 8, 12),
        ([0, 1, 2], 0, 8),
        ([1], 12, 16),
        ([2], 8, 9),
    ]


def test_a_small_shared_prefix_is_used_only_before_a_large_one() -> None:
    rows = [row_of(0, [1, 2, 3, 9], 16), row_of(1, [1, 2, 3, 8], 16), row_of(2, [1, 5], 5)]
    assert numbers(segments_of(rows, PAGE, min_saving=9)) == [
        ([0], 12, 16),
        ([0, 1], 0, 12),
        ([1], 12, 16),
        ([2], 0, 5),
    ]
    assert [len(part.rows) for part in segments_of(rows, PAGE, min_saving=13)] == [1] * 3


def test_a_page_that_fills_up_is_not_shared() -> None:
    """The tokens of a chunk see different parts of its last page."""
    rows = [row_of(at, [1, 2], 5 + at) for at in range(4)]
    assert numbers(segments_of(rows, PAGE, min_saving=1)) == [
        ([0], 4, 5),
        ([0, 1, 2, 3], 0, 4),
        ([1], 4, 6),
        ([2], 4, 7),
        ([3], 4, 8),
    ]
