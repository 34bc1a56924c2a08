"""What rows read together: every key of every row, once, and nothing else."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvcache.parts import Part, Row, parts_of

PAGE = 4
everything = {"share": 1, "most": 100, "work": 10**6, "least": 1}


@st.composite
def rows(draw: st.DrawFn) -> list[Row]:
    """Page tables that part ways, and lengths that end anywhere."""
    tables = draw(st.lists(st.lists(st.integers(0, 1), min_size=6, max_size=6), max_size=6))
    return [
        Row([2 * at + page for at, page in enumerate(table)], draw(st.integers(1, 6 * PAGE)))
        for table in tables
    ]


@given(rows(), st.integers(0, 30), st.integers(1, 4), st.integers(1, 60), st.integers(1, 9))
def test_every_key_of_every_row_once(
    rows: list[Row], share: int, most: int, work: int, least: int
) -> None:
    seen = set()
    for part in parts_of(rows, PAGE, share=share, most=most, work=work, least=least):
        assert part.begin % PAGE == 0
        assert 1 <= len(part.rows) <= most
        keys = part.end - part.begin
        assert keys <= max(work // len(part.rows), least) + PAGE - 1
        for row in part.rows:
            for key in range(part.begin, part.end):
                assert rows[row].pages[key // PAGE] == rows[part.rows[0]].pages[key // PAGE]
                assert (row, key) not in seen
                seen.add((row, key))
    assert seen == {(at, key) for at, row in enumerate(rows) for key in range(row.length)}


def test_what_is_shared_is_read_once() -> None:
    first, second, third = [1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6, 7]
    rows = [Row(first, 14), Row(second, 16), Row(third, 9)]
    assert sorted(parts_of(rows, PAGE, **everything)) == [
        Part([0], 12, 14),
        Part([0, 1], 8, 12),
        Part([0, 1, 2], 0, 8),
        Part([1], 12, 16),
        Part([2], 8, 9),
    ]


def test_little_is_not_worth_it_but_what_it_leads_to_may_be() -> None:
    rows = [Row([1, 2, 3, 9], 16), Row([1, 2, 3, 8], 16), Row([1, 5], 5)]
    assert sorted(parts_of(rows, PAGE, **{**everything, "share": 9})) == [
        Part([0], 12, 16),
        Part([0, 1], 0, 12),
        Part([1], 12, 16),
        Part([2], 0, 5),
    ]
    assert [len(part.rows) for part in parts_of(rows, PAGE, **{**everything, "share": 13})] == [
        1
    ] * 3


def test_a_page_that_fills_up_is_not_shared() -> None:
    """A chunk's tokens see different parts of its last page."""
    rows = [Row([1, 2], length) for length in (5, 6, 7, 8)]
    assert sorted(parts_of(rows, PAGE, **everything)) == [
        Part([0], 4, 5),
        Part([0, 1, 2, 3], 0, 4),
        Part([1], 4, 6),
        Part([2], 4, 7),
        Part([3], 4, 8),
    ]
