"""The prefix cache: a radix tree over token ids, page granular, beside the pool.

A node holds a run of full pages and the tokens in them. A node's key is those tokens as raw bytes,
so that following a path is one `memcmp` a node, whatever its length:

    root ─ "pages 0..3 of prompt A" ─┬─ "pages 4..9 of prompt A"
                                     └─ "pages 4..5 of prompt B"      children by their first page

The tree holds one reference on each page in it. A page that only the tree holds can be evicted, in
the order of the policy and from the ends of the branches inwards.

A follower receives the names of pages that enter and leave the tree. A page's name identifies all
tokens up to its end.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvcache.errors import Internal
from kvcache.pages.eviction import EvictionPolicy
from kvcache.pages.leaf_queue import LeafQueue
from kvcache.pages.page_pool import PagePool
from kvcache.types import PageId, PageName

__all__ = ["Namer", "PrefixTree", "Tell", "Tokens"]

TOKEN_BYTES = 4
Tokens = Sequence[int] | npt.NDArray[np.int32]
# Names a page, given the name of the page before it ("" for none) and its own int32 tokens.
Namer = Callable[[PageName, bytes], PageName]
Tell = Callable[[Sequence[PageName], Sequence[PageName]], None]  # names entered, names left


class _Node:
    __slots__ = ("children", "key", "names", "pages", "parent", "queued", "used")

    def __init__(self, parent: _Node | None, key: bytes, pages: list[PageId], used: int) -> None:
        self.parent = parent
        self.key = key
        self.pages = pages
        self.used = used
        self.queued = False  # whether the queue of leaves has it
        self.names: list[PageName] = []  # of the pages; empty without a follower
        self.children: dict[bytes, _Node] = {}

    @property
    def evictable(self) -> bool:
        """Whether it is a leaf of the tree, and neither the root nor removed."""
        return not self.children and self.parent is not None


class PrefixTree:
    """Finds the pages of earlier prompts by their tokens. The cache's lock guards it."""

    def __init__(self, pool: PagePool, page_size: int, policy: EvictionPolicy) -> None:
        self._pool = pool
        self._policy = policy
        self._page_size = page_size
        self._page_key = page_size * TOKEN_BYTES
        self._root = _Node(None, b"", [], 0)
        self._held = np.zeros(len(pool.refs), dtype=bool)
        self._name: Namer | None = None
        self._tell: Tell | None = None
        self._leaves: LeafQueue[_Node] = LeafQueue(pool)

    def match(self, tokens: Tokens, *, use: bool = True) -> list[PageId]:
        """Return the full pages of the longest cached prefix of `tokens`, without references.

        With `use`, the prefix counts as just used.
        """
        pages: list[PageId] = []
        used = self._policy.stamp()
        if self._key(tokens[: self._page_size]) not in self._root.children:
            return pages  # long prompts are not converted in vain
        for node, shared in self._walk(self._key(tokens)):
            if use:
                node.used = used
            pages += node.pages[:shared]
        return pages

    def insert(self, tokens: Tokens, pages: Sequence[PageId]) -> None:
        """Add `pages`, the KV of `tokens`; only full pages.

        Where the tree has a prefix of `tokens` already, it keeps its own pages.
        """
        key = self._key(tokens)
        used = self._policy.stamp()
        node, done = self._root, 0
        for child, shared in self._walk(key):
            done += shared
            if shared < len(child.pages):
                self._split(child, shared)
            child.used = used
            node = child
        rest = list(pages[done : len(key) // self._page_key])
        if rest:
            self._pool.share(rest)
            self._held[rest] = True
            if self._policy.pinning:  # a pinned page may return to the tree
                self._allow_eviction(rest)
            else:
                self._pool.set_evictable(rest, True)
            tail = key[done * self._page_key :]
            if node.children or node is self._root:
                child = _Node(node, tail, rest, used)
                child.names = self._names(node, tail)
                node.children[tail[: self._page_key]] = node = child
                self._leaves.add(child)
            else:  # a prompt published piece by piece stays one node
                self._leaves.unpark(node.pages[-1])
                node.names += self._names(node, tail)
                node.key += tail
                node.pages += rest
            if self._tell is not None:
                self._tell(node.names[-len(rest) :], ())

    def cut(self, tokens: Tokens, keep: int) -> None:
        """Remove page number `keep` of `tokens`, from 0, and everything that continues it."""
        done = 0
        for node, shared in self._walk(self._key(tokens)):
            if done + shared > keep:
                if done < keep:
                    self._split(node, keep - done)
                self._forget(node if done == keep else next(self._nodes(node)))
                return
            done += shared

    def evict(self, wanted: int) -> int:
        """Evict up to `wanted` pages that nobody else holds; return how many became free.

        Takes O(log leaves) per page, and per leaf that was used, or became blocked, since the last
        call.
        """
        self._leaves.unpark_released()
        freed = 0
        went: list[PageName] = []
        while freed < wanted and (node := self._leaves.pop()) is not None:
            keep = len(node.pages)
            while keep and freed < wanted and self._pool.can_evict(node.pages[keep - 1]):
                keep -= 1
                freed += 1
            gone = node.pages[keep:]
            self._release(gone)
            went += node.names[keep:]
            if keep == 0:
                self._detach(node)
                continue
            del node.pages[keep:], node.names[keep:]
            node.key = node.key[: keep * self._page_key]
            if self._pool.can_evict(node.pages[-1]):
                self._leaves.add(node)
            else:
                self._leaves.park(node)
        if self._tell is not None and went:
            self._tell((), went)
        return freed

    def can_evict(self, wanted: int) -> bool:
        """Say if `evict` would free `wanted` pages. Ends as soon as it has found so many."""
        found = 0
        gone: dict[_Node, int] = {}  # children that would be evicted, by parent
        for leaf in self._leaves:
            node = leaf
            while found < wanted and node.parent is not None:
                keep = len(node.pages)
                while keep and self._pool.can_evict(node.pages[keep - 1]):
                    keep -= 1
                found += len(node.pages) - keep
                if keep:
                    break
                node = node.parent
                gone[node] = gone.get(node, 0) + 1
                if gone[node] < len(node.children):
                    break
            if found >= wanted:
                return True
        return found >= wanted

    def follow(self, name: Namer, tell: Tell) -> list[PageName]:
        """Return the names of all pages; call `tell` for those that enter and leave from now on.

        There is one follower, the latest. Names are computed from the first follower on.
        """
        if self._name is None:
            self._name = name
            for node in self._nodes():  # parents come before their children
                if node.parent is not None:
                    node.names = self._names(node.parent, node.key)
        self._tell = tell
        return [each for node in self._nodes() for each in node.names]

    @property
    def evictable(self) -> int:
        """Pages that only the tree holds and no pin keeps."""
        return self._pool.evictable

    @property
    def cached(self) -> int:
        """Pages that only the tree holds."""
        return int(np.count_nonzero(self._cached))

    @property
    def tokens(self) -> int:
        """Tokens in the tree."""
        return int(np.count_nonzero(self._held)) * self._page_size

    def pin(self, tokens: Sequence[int]) -> int:
        """Protect the cached pages of a prefix from eviction; return their tokens.

        A second call for the same prefix replaces the pages by those that are cached then. Raises
        `NoCapacity`.
        """
        pages, key = self.match(tokens), self._pin_key(tokens)
        before = self._policy.pages(key)
        self._policy.pin(key, pages)
        self._allow_eviction([*before, *pages])
        return len(pages) * self._page_size

    def unpin(self, tokens: Sequence[int]) -> int:
        """Remove the pin of a prefix; return the tokens that it protected. Idempotent."""
        key = self._pin_key(tokens)
        before = self._policy.pages(key)
        unpinned = self._policy.unpin(key)
        self._allow_eviction(before)
        return unpinned * self._page_size

    def pinned_beside(self, tokens: Tokens) -> int:
        """Return the number of pinned pages that are not the cached prefix of `tokens`."""
        pinned = self._policy.pinned
        return pinned - self._policy.pinned_among(self.match(tokens, use=False)) if pinned else 0

    def holders(self) -> Iterator[list[PageId]]:
        """Yield the pages of each node, to prove ownership. Raises `Internal` for a broken node."""
        for node in self._nodes():
            if len(node.key) != len(node.pages) * self._page_key or not node.pages:
                raise Internal("a node's key and pages differ in length")
            yield node.pages

    @property
    def _cached(self) -> npt.NDArray[np.bool_]:
        only_here: npt.NDArray[np.bool_] = self._held & (self._pool.refs == 1)
        return only_here

    def _key(self, tokens: Tokens) -> bytes:
        full = len(tokens) - len(tokens) % self._page_size
        return np.asarray(tokens[:full], dtype=np.int32).tobytes()

    def _pin_key(self, tokens: Tokens) -> bytes:
        """Return a digest of the full pages: much of a pinned prompt may not be cached."""
        return hashlib.blake2b(self._key(tokens), digest_size=16).digest()

    def _walk(self, key: bytes) -> Iterator[tuple[_Node, int]]:
        """Yield each node along `key` with the number of its pages that match.

        All pages of a node match, except for the last node.
        """
        step = self._page_key
        node, at = self._root, 0
        while (child := node.children.get(key[at : at + step])) is not None:
            shared = len(child.pages)
            if key[at : at + len(child.key)] != child.key:
                shared = 1
                while _page(key, at, shared, step) == _page(child.key, 0, shared, step):
                    shared += 1
            yield child, shared
            if shared < len(child.pages):
                return
            node, at = child, at + len(child.key)

    def _split(self, node: _Node, pages: int) -> None:
        """Split `node` after `pages` pages. It keeps the head, so a walk can continue from it."""
        at = pages * self._page_key
        tail = _Node(node, node.key[at:], node.pages[pages:], node.used)
        tail.children, node.children = node.children, {node.key[at:][: self._page_key]: tail}
        for child in tail.children.values():
            child.parent = tail
        node.key, node.pages = node.key[:at], node.pages[:pages]
        tail.names, node.names = node.names[pages:], node.names[:pages]
        if not tail.children:
            self._leaves.unpark(tail.pages[-1])
            self._leaves.add(tail)

    def _forget(self, node: _Node) -> None:
        """Remove a node and all below it."""
        self._detach(node)
        branch = [node, *self._nodes(node)]
        for gone in branch:
            gone.parent = None
            self._leaves.unpark(gone.pages[-1])
            self._release(gone.pages)
        self._leaves.prune()
        if self._tell is not None:
            self._tell((), [each for gone in branch for each in gone.names])

    def _detach(self, node: _Node) -> None:
        """Take a node out of its parent's children."""
        parent, node.parent = node.parent, None
        if parent is not None:
            del parent.children[node.key[: self._page_key]]
            if parent.evictable:
                self._leaves.add(parent)

    def _allow_eviction(self, pages: Sequence[PageId]) -> None:
        """Allow the eviction of pages of the tree that only the tree holds, unless pinned."""
        ids = np.unique(np.array(pages, dtype=np.intp))
        allowed = self._held[ids] & self._policy.unpinned(ids)
        self._pool.set_evictable(ids[allowed], True)
        self._pool.set_evictable(ids[~allowed], False)
        self._leaves.unpark_any(ids[allowed].tolist())

    def _release(self, pages: list[PageId]) -> None:
        """Drop the tree's reference to pages."""
        self._held[pages] = False
        self._pool.set_evictable(pages, False)
        self._pool.drop(pages)

    def _names(self, before: _Node, key: bytes) -> list[PageName]:
        """Return the names of the pages of `key`, which continues `before`."""
        names: list[PageName] = []
        if self._name is not None:
            last = before.names[-1] if before.names else PageName("")
            for at in range(0, len(key), self._page_key):
                last = self._name(last, key[at : at + self._page_key])
                names.append(last)
        return names

    def _nodes(self, below: _Node | None = None) -> Iterator[_Node]:
        stack = list((below or self._root).children.values())
        while stack:
            node = stack.pop()
            stack += node.children.values()
            yield node


def _page(key: bytes, at: int, page: int, step: int) -> bytes:
    return key[at + page * step : at + (page + 1) * step]
