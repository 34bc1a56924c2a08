"""The rows that an engine computes in a step: one for each token, and then padding."""

from __future__ import annotations

__all__ = ["padded_rows"]


def padded_rows(rows: int, multiple: int) -> int:
    """Round `rows` up to a multiple.

    0: not at all; 1: to one of a few counts, some fifty up to 2048 rows.
    """
    if multiple > 1:
        return -(-rows // multiple) * multiple
    if multiple == 0:
        return rows
    step = 1 if rows <= 8 else 4 if rows <= 32 else 16 if rows <= 128 else 64
    return -(-rows // step) * step
