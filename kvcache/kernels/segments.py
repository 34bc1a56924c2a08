"""What the kernels read: a run of pages, and the rows that attend to it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["KVSegment"]


class KVSegment(NamedTuple):
    """Keys `[begin, end)` and their values, for the rows that attend to them.

    `pages` are those of the keys from `begin` on, which is a page's first. Each of `readers` is
    `(row, limit, piece)`: the row sees the keys before position `limit`, and writes a partial
    result to `piece`, to be merged; -1 where this segment is all that the row reads.
    """

    readers: list[tuple[int, int, int]]
    pages: npt.NDArray[np.int32]
    begin: int
    end: int
