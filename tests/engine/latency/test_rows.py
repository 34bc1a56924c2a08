"""The padding of a step's rows."""

from __future__ import annotations

from engine.latency import padded_rows


def test_padding_gives_few_row_counts_and_adds_few_rows():
    sizes = [padded_rows(rows, 1) for rows in range(2049)]
    assert all(rows <= size <= max(rows + 3, rows * 1.5) for rows, size in enumerate(sizes))
    assert sizes == sorted(sizes)
    assert len(set(sizes)) < 60


def test_rows_become_a_multiple_or_stay():
    assert [padded_rows(33, multiple) for multiple in (0, 1, 4, 64)] == [33, 48, 36, 64]
    assert [padded_rows(0, multiple) for multiple in (0, 1, 4)] == [0, 0, 0]
