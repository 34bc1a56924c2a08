"""Who holds which page of a pool, and what is evicted when pages are wanted."""

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
        """The full pages of `tokens` are in the prefix tree now."""
        ...


class PageManager:
    """Free pages, counted pages, and the prefix tree, which gives pages back under pressure.

    Sequences, leases, quarantine and the tree hold one reference on each of their pages. The
    cache's lock guards it.
    """

    def __init__(self, pages: int, page_size: int) -> None:
        """`pages` of `page_size` tokens, of which page 0 is set aside."""
        self.pool = PagePool(pages)
        self.policy = EvictionPolicy(pages)
        self.prefix = PrefixTree(self.pool, page_size, self.policy)
        self.lower_tier: LowerTier | None = None

    def take(self, count: int, *, leaving: int = 0) -> list[PageId]:
        """`count` pages, each now held once; cached ones make way.

        Raises `NoCapacity`, also where fewer than `leaving` pages would be available afterwards.
        What can never be had evicts nothing: one that waits for room asks again at each step.
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
        """Hold each of `pages` once more; returns them as a list of one's own."""
        self.pool.share(pages)
        return list(pages)

    def drop(self, pages: Sequence[PageId]) -> None:
        """Hold each of `pages` once less; the last to let go frees it."""
        self.pool.drop(pages)

    def publish(self, tokens: Tokens, pages: Sequence[PageId]) -> None:
        """Let the prefix tree share full pages, and the tier below keep a copy of them."""
        self.prefix.insert(tokens, pages)
        if self.lower_tier is not None:
            self.lower_tier.offer(tokens)

    @property
    def refs(self) -> npt.NDArray[np.int32]:
        """How often each page is held."""
        return self.pool.refs

    @property
    def total(self) -> int:
        """All pages but the scratch page."""
        return self.pool.total

    @property
    def available(self) -> int:
        """Pages that are free or can be made so by eviction, at most.

        It may be fewer: what nobody else holds cannot go while somebody holds what continues it,
        as a sequence does that has a duplicate of the former.
        """
        return self.pool.free + self.prefix.evictable

    def check(self, holders: Iterable[Sequence[PageId]]) -> None:
        """Prove that the tree's pages, `holders`' and the free ones partition the pool.

        Raises `Internal`.
        """
        self.pool.check([*self.prefix.holders(), *holders])
