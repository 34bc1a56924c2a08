"""The work of attention kernels: a run of pages, and the rows that attend to it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["KVSegment"]


class KVSegment(NamedTuple):
    """Keys `[begin, end)` and their values, for the rows that attend to them.

    `pages` hold the keys from `begin` on; `begin` is a page boundary. Each reader is
    `(row, limit, partial)`: the row attends to the keys before position `limit`, and its result is
    partial result number `partial`, to be merged with others. `partial` is -1 where the row reads
    no other segment.
    """

    readers: list[tuple[int, int, int]]
    pages: npt.NDArray[np.int32]
    begin: int
    end: int
