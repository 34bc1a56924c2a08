"""The pages of one pool: their holders, the prefix tree, and eviction when pages are wanted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvcache.errors import NoCapacity
from kvcache.pages.eviction import EvictionPolicy
from kvcache.pages.page_pool import PagePool
from kvcache.pages.prefix_tree import PrefixTree, Tokens
from kvcache.types import PageId

__all__ = ["LowerTier", "PageManager"]


class LowerTier(Protocol):
    """The tier below: it keeps copies of prefixes that may be evicted here."""

    def offer(self, tokens: Tokens) -> None:
        """Note that the full pages of `tokens` have entered the prefix tree."""
        ...


class PageManager:
    """Free pages, referenced pages, and the prefix tree, which returns pages under pressure.

    Sequences, leases, quarantine and the tree hold one reference on each of their pages. The
    cache's lock guards it.
    """

    def __init__(self, pages: int, page_size: int) -> None:
        """Manage `pages` of `page_size` tokens; page 0 is reserved."""
        self._page_size = page_size
        self.pool = PagePool(pages)
        self.policy = EvictionPolicy(pages)
        self.prefix = PrefixTree(self.pool, page_size, self.policy)
        self.lower_tier: LowerTier | None = None
        self.reserved = 0  # pages that newcomers leave available, for a sequence that waits

    def match(self, tokens: Tokens) -> list[PageId]:
        """Return the pages of the longest prefix of `tokens` in the prefix tree."""
        return self.prefix.match(tokens)

    def take(self, count: int, *, leaving: int = 0) -> list[PageId]:
        """Take `count` pages, one reference each; evict cached ones where too few are free.

        Raises `NoCapacity`, also if fewer than `leaving` pages would be available afterwards. A
        request that cannot be met evicts nothing, because waiting jobs retry at each step.
        """
        if leaving and self.available < count + leaving:
            raise NoCapacity(f"{count} pages wanted, {self.available} available")
        missing = count - self.pool.free
        if missing > 0:
            if missing > self.prefix.evictable:
                raise NoCapacity(f"{count} pages wanted, {self.available} available")
            self.prefix.evict(missing)
        return self.pool.take(count)

    def share(self, pages: Sequence[PageId]) -> list[PageId]:
        """Add a reference to each of `pages`; return a copy of the list."""
        self.pool.share(pages)
        return list(pages)

    def drop(self, pages: Sequence[PageId]) -> None:
        """Drop a reference to each of `pages`; a page without references is free."""
        self.pool.drop(pages)

    def publish(self, tokens: Tokens, pages: Sequence[PageId]) -> None:
        """Enter full pages into the prefix tree, and offer them to the tier below."""
        self.prefix.insert(tokens, pages)
        if self.lower_tier is not None:
            self.lower_tier.offer(tokens)

    def uncache(self, tokens: Tokens, pages: Sequence[PageId]) -> None:
        """Remove `pages`, the last ones of `tokens`, from the prefix tree where only it holds them.

        What continues them goes too. In the tree they could not be evicted before it.
        """
        if not any(self.refs[page] for page in pages):
            return
        first = len(tokens) // self._page_size - len(pages)
        cached = self.prefix.match(tokens, use=False)[first:]
        for number, (page, other) in enumerate(zip(pages, cached, strict=False), first):
            if page == other and self.pool.can_evict(page):
                self.prefix.cut(tokens, number)
                return

    def check_room(self, tokens: Tokens) -> None:
        """Raise `NoCapacity` if a sequence of `tokens` has no room while other prefixes are pinned.

        It would wait, and keep those behind it waiting, until somebody unpins.
        """
        wanted, pinned = -(-len(tokens) // self._page_size), self.prefix.pinned_beside(tokens)
        if pinned and wanted > self.total - pinned:
            raise NoCapacity(f"{wanted} pages are wanted; other prefixes pin {pinned}")

    @property
    def refs(self) -> npt.NDArray[np.int32]:
        """References to each page."""
        return self.pool.refs

    @property
    def total(self) -> int:
        """All pages but the scratch page."""
        return self.pool.total

    @property
    def available(self) -> int:
        """An upper bound of the pages that are free or can be freed by eviction.

        Fewer are available if a page in use continues a page that only the tree holds. That happens
        when a sequence has a duplicate of the latter.
        """
        return self.pool.free + self.prefix.evictable

    def check(self, holders: Iterable[Sequence[PageId]]) -> None:
        """Check that the tree, `holders` and the free list account for each reference to a page.

        Raises `Internal` if they do not.
        """
        self.pool.check([*self.prefix.holders(), *holders])
