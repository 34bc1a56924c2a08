"""The eviction policy of the prefix tree: which cached pages may be evicted, in which order.

It combines two policies (§3.5): the engine's own, least recently used first, and the router's,
which pins prefixes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcache.errors import NoCapacity
from kvcache.types import PageId

__all__ = ["EvictionPolicy"]

MAX_PINS = 1024  # each keeps a list of its pages until it is unpinned


class EvictionPolicy:
    """Pinned pages stay. Of the others, those of the least recently used branch go first.

    At most half of the pool may be pinned, so that there is always room to work. Several prefixes
    may pin the same pages, so the number of pins is bounded too. The cache's lock guards it.
    """

    def __init__(self, pages: int) -> None:
        self._pins: npt.NDArray[np.int32] = np.zeros(pages, dtype=np.int32)
        self._pinned: dict[bytes, list[PageId]] = {}
        self._limit = (pages - 1) // 2
        self._clock = count(1)

    def stamp(self) -> int:
        """Return a time of use. Later stamps are larger, and evicted later."""
        return next(self._clock)

    def pin(self, key: bytes, pages: Sequence[PageId]) -> None:
        """Pin `pages` for the prefix `key`, in place of the pages that `key` pinned before.

        Raises `NoCapacity` beyond the limits, changing nothing.
        """
        if pages and key not in self._pinned and len(self._pinned) >= MAX_PINS:
            raise NoCapacity(f"{MAX_PINS} prefixes are pinned, the limit")
        before = self._pinned.get(key, [])
        self.unpin(key)
        if not pages:  # the record would never be removed if its prefix is never unpinned
            return
        self._pins[list(pages)] += 1
        self._pinned[key] = list(pages)
        if self.pinned > self._limit:
            self.unpin(key)
            if before:
                self._pins[before] += 1
                self._pinned[key] = before
            raise NoCapacity(f"{len(pages)} pages wanted; at most {self._limit} may be pinned")

    def unpin(self, key: bytes) -> int:
        """Remove the pin of `key`; return how many pages it protected. Idempotent."""
        pages = self._pinned.pop(key, [])
        self._pins[pages] -= 1
        return len(pages)

    @property
    def pinning(self) -> bool:
        """Whether any prefix is pinned."""
        return bool(self._pinned)

    @property
    def pinned(self) -> int:
        """Number of pinned pages."""
        return int(np.count_nonzero(self._pins)) if self._pinned else 0

    def pinned_among(self, pages: Sequence[PageId]) -> int:
        """Return how many of `pages`, all different, are pinned."""
        return int(np.count_nonzero(self._pins[list(pages)])) if self._pinned else 0

    def pages(self, key: bytes) -> list[PageId]:
        """Return the pages that the pin of `key` protects."""
        return list(self._pinned.get(key, []))

    def unpinned(self, pages: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.bool_]:
        """Return a mask over `pages`: whether no pin protects the page."""
        unpinned: npt.NDArray[np.bool_] = self._pins[pages] == 0
        return unpinned
