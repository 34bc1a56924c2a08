"""Block tables: which pages a sequence's positions lie in."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvcache.types import PageId

__all__ = ["BlockTable", "PageIds"]

PageIds = npt.NDArray[np.int32]
LEAST = 16  # entries of the smallest array


class BlockTable:
    """The pages of one sequence, in the order of its positions, as an int32 array.

    The array is updated in place for the life of the sequence. A full array is replaced by one of
    twice the size. Entry `i` is the page of positions `[i * page_size, (i + 1) * page_size)`.
    """

    __slots__ = ("_count", "_ids")

    def __init__(self, pages: Sequence[PageId] = ()) -> None:
        self._count = len(pages)
        self._ids: PageIds = np.zeros(max(LEAST, self._count), dtype=np.int32)
        self._ids[: self._count] = pages

    def __len__(self) -> int:
        return self._count

    @property
    def ids(self) -> PageIds:
        """The pages, as a view, valid until `truncate`. It does not include later `extend`s."""
        return self._ids[: self._count]

    def pages(self, begin: int = 0, end: int | None = None) -> list[PageId]:
        """Return entries `[begin, end)` as a list of their own."""
        pages: list[PageId] = self.ids[begin:end].tolist()
        return pages

    def extend(self, pages: Sequence[PageId]) -> None:
        """Append pages."""
        count = self._count + len(pages)
        if count > len(self._ids):
            larger: PageIds = np.zeros(max(count, 2 * len(self._ids)), dtype=np.int32)
            larger[: self._count] = self.ids
            self._ids = larger
        self._ids[self._count : count] = pages
        self._count = count

    def fill(self, entries: Sequence[int], pages: Sequence[PageId]) -> None:
        """Replace the pages of some entries."""
        self.ids[np.asarray(entries, dtype=np.intp)] = pages

    def truncate(self, count: int) -> list[PageId]:
        """Keep the first `count` entries; return the others."""
        removed = self.pages(count)
        self._count = min(count, self._count)
        return removed
