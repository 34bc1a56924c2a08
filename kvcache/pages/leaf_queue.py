"""The leaves of a prefix tree in the order of their eviction."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from itertools import count
from typing import Generic, Protocol, TypeVar

from kvcache.pages.page_pool import PagePool
from kvcache.types import PageId

__all__ = ["Leaf", "LeafQueue"]


class Leaf(Protocol):
    """What the queue needs of a node. The queue may hold nodes that have ceased to be leaves."""

    pages: list[PageId]
    queued: bool  # whether the heap has it; the queue sets this
    used: int  # time of the last use

    @property
    def evictable(self) -> bool:
        """Whether it is a leaf of the tree."""
        ...


L = TypeVar("L", bound=Leaf)


class LeafQueue(Generic[L]):
    """A heap of leaves by last use, and the parked leaves, whose last page is in use or pinned.

    The heap orders leaves by their last use as of queueing, and `pop` requeues those that were used
    since. Each leaf of the tree is in the heap once, or parked.
    """

    def __init__(self, pool: PagePool) -> None:
        """`pool` reports when the last pages of parked leaves are no longer in use."""
        self._pool = pool
        self._heap: list[tuple[int, int, L]] = []
        self._parked: dict[PageId, L] = {}  # by last page
        self._ages = count()

    def __len__(self) -> int:
        """Number of entries in the heap, including nodes that have ceased to be leaves."""
        return len(self._heap)

    def add(self, leaf: L) -> None:
        """Queue a leaf, unless it is queued."""
        if not leaf.queued:
            leaf.queued = True
            heapq.heappush(self._heap, (leaf.used, next(self._ages), leaf))

    def pop(self) -> L | None:
        """Remove the least recently used leaf from the heap and return it; None if it is empty.

        Takes O(log leaves) per leaf that was used since it was queued.
        """
        while self._heap:
            used, _, node = heapq.heappop(self._heap)
            node.queued = False
            if not node.evictable:  # split since, or removed
                continue
            if node.used == used:
                return node
            self.add(node)
        return None

    def park(self, leaf: L) -> None:
        """Hold back a leaf until its last page can be evicted."""
        self._parked[leaf.pages[-1]] = leaf
        self._pool.awaited.add(leaf.pages[-1])

    def unpark(self, page: PageId) -> None:
        """Queue the leaf that ends with `page`, if it is parked."""
        self._pool.awaited.discard(page)
        leaf = self._parked.pop(page, None)
        if leaf is not None:
            self.add(leaf)

    def unpark_any(self, pages: Iterable[PageId]) -> None:
        """Queue the parked leaves that end with one of `pages`."""
        for page in self._parked.keys() & set(pages):
            self.unpark(page)

    def unpark_released(self) -> None:
        """Queue the parked leaves whose last page is no longer in use."""
        for page in self._pool.unblocked:
            self.unpark(page)
        self._pool.unblocked.clear()

    def __iter__(self) -> Iterator[L]:
        """All leaves, in no order; the caller changes none meanwhile."""
        yield from (node for _, _, node in self._heap if node.evictable)
        yield from (node for node in self._parked.values() if node.evictable and not node.queued)

    def prune(self) -> None:
        """Drop nodes that have ceased to be leaves. Takes O(leaves)."""
        for _, _, node in self._heap:
            node.queued = node.evictable
        self._heap = [entry for entry in self._heap if entry[2].queued]
        heapq.heapify(self._heap)
