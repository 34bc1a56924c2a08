"""Free pages, and the references to the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcache.errors import Internal, NoCapacity
from kvcache.types import PageId

__all__ = ["SCRATCH_PAGE", "PagePool"]

IntArray = npt.NDArray[np.integer[Any]]
SCRATCH_PAGE = PageId(0)


class PagePool:
    """Reference counts and the free list of `pages` pages; page 0 is reserved.

    Holders (sequences, leases, the prefix tree, quarantine) have one reference per page. A page
    without references is free. Not thread-safe: the cache's lock guards it.
    """

    def __init__(self, pages: int) -> None:
        # The free list is a stack whose top is the lowest page: runs of fresh pages are contiguous.
        self._free = [PageId(page) for page in range(pages - 1, 0, -1)]
        self.refs = np.zeros(pages, dtype=np.int32)
        self.total = pages - 1
        self.evictable = 0  # pages of which `can_evict` is true
        self.awaited: set[PageId] = set()  # pages to report in `unblocked`
        self.unblocked: list[PageId] = []  # awaited pages that can be evicted now
        self._evictable = np.zeros(pages, dtype=bool)
        self._readers: dict[PageId, Callable[[], object]] = {}

    @property
    def free(self) -> int:
        """Number of free pages."""
        return len(self._free)

    def take(self, count: int) -> list[PageId]:
        """Take `count` free pages, one reference each. Raises `NoCapacity`, taking none."""
        if count > len(self._free):
            raise NoCapacity(f"{count} pages wanted, {len(self._free)} free")
        if count == 0:
            return []
        pages = self._free[-count:][::-1]
        del self._free[-count:]
        self.refs[pages] = 1
        return pages

    def claim(self, pages: Iterable[PageId]) -> list[PageId]:
        """Take these pages, one reference each. Raises `Internal` if one of them is not free."""
        wanted = set(pages)
        free = [page for page in self._free if page not in wanted]
        if len(free) + len(wanted) != len(self._free):
            raise Internal("a claimed page is held")
        self._free = free
        claimed = sorted(wanted)
        self.refs[claimed] = 1
        return claimed

    def share(self, pages: Sequence[PageId]) -> None:
        """Add a reference to each of `pages`. Raises `Internal` for a free page."""
        refs, evictable = self.refs, self._evictable
        for page in pages:
            count = refs[page]
            if count <= 0:
                raise Internal(f"page {page} is shared without a holder")
            if count == 1 and evictable[page]:
                self.evictable -= 1
            refs[page] = count + 1

    def drop(self, pages: Sequence[PageId]) -> None:
        """Drop a reference to each of `pages`; a page without references is free.

        Waits for the reader of a page that it frees, if there is one. Raises `Internal` for a page
        that is free already.
        """
        refs, evictable = self.refs, self._evictable
        # Backwards, so that the free list gives them out again in ascending order.
        for page in reversed(pages):
            count = refs[page] - 1
            if count < 0:
                raise Internal(f"page {page} is dropped without a holder")
            refs[page] = count
            if count == 0:
                if self._readers and page in self._readers:
                    self._readers.pop(page)()
                self._free.append(page)
            elif count == 1 and evictable[page]:
                self.evictable += 1
                if page in self.awaited:
                    self.awaited.discard(page)
                    self.unblocked.append(page)

    def set_evictable(self, pages: Sequence[PageId] | IntArray, flag: bool) -> None:
        """Set whether held pages, all different, may be evicted once they have one reference."""
        ids = np.asarray(pages, dtype=np.intp)
        changed = ids[self._evictable[ids] != flag]
        self._evictable[changed] = flag
        single = int(np.count_nonzero(self.refs[changed] == 1))
        self.evictable += single if flag else -single

    def can_evict(self, page: PageId) -> bool:
        """Whether a page may be evicted and has a single reference, the prefix tree's."""
        return bool(self._evictable[page] and self.refs[page] == 1)

    def last_holder(self, page: PageId) -> bool:
        """Whether a held page would be free, or could be evicted, without one of its holders."""
        return bool(self.refs[page] == (2 if self._evictable[page] else 1))

    def begin_read(self, page: PageId, wait: Callable[[], object]) -> None:
        """Let a held page be read without the lock, until `end_read`.

        If the page is freed earlier, `drop` calls `wait`, which returns when the page has been
        read. So a page that is being copied is neither freed nor reused (DistServe). The
        reader holds no reference: a cached page can be evicted at any moment, after waiting for at
        most one page's copy. The reader must not need the lock to finish. A page has one reader at
        a time. Raises `Internal` for a free page.
        """
        if self.refs[page] <= 0:
            raise Internal(f"page {page} is read without a holder")
        self._readers[page] = wait

    def end_read(self, page: PageId) -> None:
        """End the read of a page, which may have been freed already."""
        self._readers.pop(page, None)

    def check(self, holders: Iterable[Sequence[PageId]]) -> None:
        """Check that `holders` and the free list account for all pages and references.

        Raises `Internal` if they do not.
        """
        counted = self._count(chain.from_iterable(holders))
        if counted[SCRATCH_PAGE] or self.refs[SCRATCH_PAGE]:
            raise Internal("the scratch page is held")
        wrong = np.flatnonzero(counted != self.refs)
        if wrong.size:
            page = int(wrong[0])
            raise Internal(
                f"{wrong.size} pages miscounted: page {page} has {self.refs[page]} references, "
                f"{counted[page]} holders"
            )
        if any(self.refs[page] <= 0 for page in self._readers):
            raise Internal("a page is free while it is being read")
        if self.evictable != np.count_nonzero(self._evictable & (self.refs == 1)):
            raise Internal("the count of evictable pages is wrong")
        if not np.array_equal(self._count(self._free)[1:], self.refs[1:] == 0):
            raise Internal("the free list is not the set of pages without holders")

    def _count(self, pages: Iterable[PageId]) -> IntArray:
        """Return how often each page of the pool occurs in `pages`."""
        ids = np.fromiter(pages, dtype=np.intp)
        return np.bincount(ids, minlength=len(self.refs))
