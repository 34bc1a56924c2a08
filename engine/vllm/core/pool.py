"""vLLM's block pool, as receive leases and puts need it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm import SamplingParams
from vllm.v1.request import Request

from engine.vllm.core.prefix_names import PrefixNames
from kvcache.errors import Internal, NoCapacity
from kvcache.types import PageId

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager

__all__ = ["BlockUse", "VllmPages"]

GROUP = 0  # the one group of layers; models with several are refused


class BlockUse(NamedTuple):
    """Blocks by owner; they sum to `total`, except for `pinned`, which are cached or active too."""

    total: int
    free: int
    cached: int
    leased: int
    active: int
    quarantined: int
    pinned: int


class VllmPages:
    """The blocks of one engine core. Implements `kvcache.lease.LeasablePages`.

    References that are held here are vLLM's own counts, raised and lowered through its block pool,
    so vLLM neither hands out nor evicts such a block.
    """

    reserved = 0  # pages that newcomers leave available: vLLM's scheduler knows of none

    def __init__(
        self, manager: KVCacheManager, page_size: int, hasher: Callable[[Any], list[Any]]
    ) -> None:
        """`hasher` makes the block hashes of a request, as the engine core does."""
        self.names = PrefixNames()
        self._manager = manager
        self._pool = manager.block_pool
        self._page_size = page_size
        self._hasher = hasher
        self._params = SamplingParams(max_tokens=1)
        self._held: Counter[int] = Counter()  # references that are ours, by block
        self._pins: defaultdict[bytes, list[int]] = defaultdict(list)  # blocks, by hash

    @property
    def total(self) -> int:
        """All blocks but the one that pads."""
        return int(self._pool.num_gpu_blocks) - 1

    @property
    def available(self) -> int:
        """Blocks that nobody holds, cached ones included."""
        return int(self._pool.get_num_free_blocks())

    def match(self, tokens: Sequence[int]) -> list[PageId]:
        """Return the blocks of the longest cached prefix of `tokens`."""
        return self._cached(self._request(tokens).block_hashes) if tokens else []

    def take(self, count: int) -> list[PageId]:
        """Take `count` blocks; cached ones are evicted. Raises `NoCapacity`, changing nothing."""
        if count > self.available:
            raise NoCapacity(f"{count} blocks wanted, {self.available} available")
        taken = [PageId(block.block_id) for block in self._pool.get_new_blocks(count)]
        self._held.update(taken)
        return taken

    def share(self, pages: Sequence[PageId]) -> list[PageId]:
        """Add a reference to each block; return a copy of the list."""
        self._pool.touch([self._pool.blocks[page] for page in pages])
        self._held.update(pages)
        return list(pages)

    def drop(self, pages: Sequence[PageId]) -> None:
        """Drop a reference to each block. Of cached ones, the last is evicted first."""
        for page in pages:
            self._held[page] -= 1
            if not self._held[page]:
                del self._held[page]
        self._pool.free_blocks([self._pool.blocks[page] for page in reversed(pages)])

    def publish(self, tokens: Sequence[int], pages: Sequence[PageId]) -> None:
        """Enter full blocks into the prefix cache; those that it has already stay duplicates."""
        if not pages:
            return
        request = self._request(tokens)
        known = len(self._cached(request.block_hashes))
        blocks = [self._pool.blocks[page] for page in pages]
        full = min(len(blocks), len(request.block_hashes))
        for index in range(known, full):
            # One by one: a later block of the prefix may be cached though an earlier one is not.
            if blocks[index].block_hash is None:
                self._pool.cache_full_blocks(
                    request, blocks, index, index + 1, self._page_size, GROUP
                )

    def pin(self, tokens: Sequence[int]) -> int:
        """Protect the cached part of `tokens`; return its tokens. Raises `NoCapacity`."""
        request = self._request(tokens)
        pages = self._cached(request.block_hashes)
        if sum(map(len, self._pins.values())) + len(pages) > self.total // 2:
            raise NoCapacity(f"pins may hold {self.total // 2} blocks")
        self.share(pages)
        for hash_, page in zip(request.block_hashes, pages, strict=False):
            self._pins[hash_].append(page)
        return len(pages) * self._page_size

    def unpin(self, tokens: Sequence[int]) -> int:
        """End that protection; return the number of tokens that had it. Idempotent."""
        ended: list[PageId] = []
        for hash_ in self._request(tokens).block_hashes:
            pages = self._pins.get(hash_)
            if not pages:
                break
            ended.append(PageId(pages.pop()))
            if not pages:
                del self._pins[hash_]
        self.drop(ended)
        return len(ended) * self._page_size

    def changes(self) -> tuple[list[str], list[str]]:
        """Return the names of pages that the prefix cache has gained and lost since last asked."""
        return self.names.update(self._pool.take_events())

    def use(self, leased: int, quarantined: int, sequences: int) -> BlockUse:
        """Count blocks by owner. `sequences` are blocks held for generations that will start."""
        cached = pinned_only = 0
        pins: Counter[int] = Counter(page for pages in self._pins.values() for page in pages)
        for block in self._pool.blocks:
            if block.ref_cnt == 0 and block.block_hash is not None:
                cached += 1
            elif block.ref_cnt and block.ref_cnt == pins.get(block.block_id, 0):
                pinned_only += 1
        free = self.available - cached
        active = self.total - self.available - leased - quarantined - pinned_only
        return BlockUse(
            self.total, free, cached + pinned_only, leased, active, quarantined, len(pins)
        )

    def check(self, holders: Sequence[Sequence[int]]) -> None:
        """Check that `holders`, pins and vLLM's requests account for every reference to a block.

        Raises `Internal` if they do not.
        """
        ours: Counter[int] = Counter(page for pages in holders for page in pages)
        ours.update(page for pages in self._pins.values() for page in pages)
        if ours != self._held:
            raise Internal(f"blocks are held {dict(self._held)}, but wanted {dict(ours)}")
        requests: Counter[int] = Counter()
        for manager in self._manager.coordinator.single_type_managers:
            for blocks in manager.req_to_blocks.values():
                requests.update(block.block_id for block in blocks if not block.is_null)
        free = 0
        for block in self._pool.blocks:
            if block.is_null:
                continue
            expected = ours.get(block.block_id, 0) + requests.get(block.block_id, 0)
            if block.ref_cnt != expected:
                raise Internal(
                    f"block {block.block_id} has {block.ref_cnt} references; leases, puts and "
                    f"pins have {ours.get(block.block_id, 0)}, requests "
                    f"{requests.get(block.block_id, 0)}"
                )
            free += not block.ref_cnt
        if free != self.available:
            raise Internal(f"{free} blocks are unused, {self.available} in the free list")

    def _request(self, tokens: Sequence[int]) -> Any:
        """Return a request of vLLM's with the block hashes of `tokens`; it is never scheduled."""
        return Request(
            request_id="microserve",
            prompt_token_ids=list(tokens),
            sampling_params=self._params,
            pooling_params=None,
            arrival_time=0.0,
            block_hasher=self._hasher,
        )

    def _cached(self, hashes: Sequence[Any]) -> list[PageId]:
        pages: list[PageId] = []
        for hash_ in hashes:
            found = self._pool.get_cached_block(hash_, [GROUP])
            if found is None:
                break
            pages.append(PageId(found[0].block_id))
        return pages
