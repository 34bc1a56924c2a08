"""Which cached pages may be evicted, and in which order: policy, apart from the tree's mechanism.

Two policies meet here (§3.5): the engine's own, least recently used first, and the router's, who
pins prefixes that it knows to matter.
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


class EvictionPolicy:
    """Pinned pages never go; of the others, those of the branch used longest ago go first.

    At most half of the pool may be pinned, so that there is always room to work. The cache's lock
    guards it.
    """

    def __init__(self, pages: int) -> None:
        self._pins: npt.NDArray[np.int32] = np.zeros(pages, dtype=np.int32)
        self._pinned: dict[bytes, list[PageId]] = {}
        self._limit = (pages - 1) // 2
        self._clock = count(1)

    def stamp(self) -> int:
        """When something is used: later stamps are larger, and evicted later."""
        return next(self._clock)

    def pin(self, key: bytes, pages: Sequence[PageId]) -> None:
        """Keep `pages`, those of the prefix `key`; instead of what `key` kept before, if anything.

        Raises `NoCapacity` beyond the limit, changing nothing.
        """
        before = self._pinned.get(key, [])
        self.unpin(key)
        self._pins[list(pages)] += 1
        self._pinned[key] = list(pages)
        if self.pinned > self._limit:
            self.unpin(key)
            if before:
                self._pins[before] += 1
                self._pinned[key] = before
            raise NoCapacity(f"{len(pages)} pages wanted; at most {self._limit} may be pinned")

    def unpin(self, key: bytes) -> int:
        """Keep the prefix `key` no longer; returns how many pages it kept. Idempotent."""
        pages = self._pinned.pop(key, [])
        self._pins[pages] -= 1
        return len(pages)

    @property
    def pinned(self) -> int:
        """Pages that may not go."""
        return int(np.count_nonzero(self._pins))

    def pages(self, key: bytes) -> list[PageId]:
        """The pages that the pin of `key` keeps."""
        return list(self._pinned.get(key, []))

    def unpinned(self, pages: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.bool_]:
        """Whether each of `pages` may go."""
        unpinned: npt.NDArray[np.bool_] = self._pins[pages] == 0
        return unpinned
