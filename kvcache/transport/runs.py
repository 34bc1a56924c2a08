"""What a range of positions is in bytes, on two sides whose pages lie differently."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvcache.types import PageId

__all__ = ["Runs", "byte_runs"]

Runs = npt.NDArray[np.int64]  # [runs, 3]: source offset, target offset, bytes


def byte_runs(
    source_pages: Sequence[PageId],
    target_pages: Sequence[PageId],
    target_first: int,
    size: int,
    token: int,
    begin: int,
    end: int,
) -> Runs:
    """What to copy for positions `[begin, end)` of one layer; the same for every layer.

    Pages have `size` tokens, of which each takes `token` bytes of keys and as many of values.
    `source_pages[i]` holds the positions from `i * size`; `target_pages[0]` those from
    `target_first * size`. A position's slot in its page is the same on both sides. Offsets count
    from a layer's page 0. Whole pages that follow each other on both sides are one run.
    """
    page = 2 * size * token
    first, last = -(-begin // size), end // size  # the whole pages
    edges = [(begin, first * size), (last * size, end)] if first <= last else [(begin, end)]
    runs: list[tuple[int, int, int]] = []
    for low, high in edges:
        if low < high:
            index, within = low // size, low % size * token
            source = source_pages[index] * page + within
            target = target_pages[index - target_first] * page + within
            for half in (0, size * token):  # keys, values
                runs.append((source + half, target + half, (high - low) * token))
    partial = np.array(runs, dtype=np.int64).reshape(-1, 3)
    if first >= last:
        return partial
    of = np.asarray(source_pages[first:last], dtype=np.int64)
    to = np.asarray(target_pages[first - target_first : last - target_first], dtype=np.int64)
    broken = (np.diff(of) != 1) | (np.diff(to) != 1)
    starts = np.concatenate(([0], np.flatnonzero(broken) + 1))
    counts = np.diff(np.concatenate((starts, [len(of)])))
    whole = np.stack((of[starts], to[starts], counts), axis=1) * page
    return np.concatenate((partial, whole))
