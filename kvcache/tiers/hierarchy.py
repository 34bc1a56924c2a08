"""The tiers below the device's pool, fastest first: promotion of prefixes, swaps of sequences."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

import numpy as np
import torch

from kvcache.errors import NoCapacity
from kvcache.pages import PageManager, Tokens
from kvcache.sequences import SwappedSequence
from kvcache.tiers.move import Move
from kvcache.tiers.statistics import TierUse
from kvcache.tiers.store import DevicePages, TierStore
from kvcache.tiers.swap import Swap
from kvcache.tiers.tier import Tier, UpperTier
from kvcache.types import PageId

__all__ = ["Tiers"]


class DeviceTier:
    """The device's pages as the `UpperTier` of the first tier."""

    def __init__(self, manager: PageManager, pages: DevicePages) -> None:
        self.manager = manager
        self._pages = pages

    def read(self, page: PageId, out: torch.Tensor) -> None:
        self._pages.read(page, out)


class Tiers:
    """All tiers of one cache, guarded by the cache's lock. Each is filled from the one above."""

    def __init__(
        self,
        stores: Sequence[TierStore],
        manager: PageManager,
        pages: Callable[[], DevicePages],
        page_size: int,
        lock: threading.RLock,
    ) -> None:
        self._manager = manager
        self._size = page_size
        self._promoting: dict[tuple[Tier, PageId], Future[int]] = {}
        self._swaps: set[Swap] = set()
        self._all: list[Tier] = []
        for store in stores:
            device = pages()
            above: UpperTier = self._all[-1] if self._all else DeviceTier(manager, device)
            tier = Tier(store, device, above, page_size, lock)
            above.manager.lower_tier = tier
            self._all.append(tier)

    def __iter__(self) -> Iterator[Tier]:
        return iter(self._all)

    @property
    def persistent(self) -> bool:
        """Whether the contents of a tier survive the process."""
        return any(tier.persistent for tier in self._all)

    def promote(self, tokens: Tokens, leaving: int) -> Future[int] | None:
        """Start a promotion; see `KVCache.promote`. Keep `leaving` device pages available."""
        if not self._all:
            return None
        tokens = np.asarray(tokens, dtype=np.int32)
        on_device = self._manager.prefix.match(tokens)
        tier, in_tier = None, on_device
        for candidate in self._all:
            found = candidate.manager.prefix.match(tokens)
            if len(found) > len(in_tier):
                tier, in_tier = candidate, found
        if tier is None:
            return None
        key = (tier, in_tier[len(on_device)])
        if key in self._promoting:
            return self._promoting[key]
        on_device = self._manager.share(on_device)
        # Take pages after sharing `on_device`, so that this cannot evict the pages they follow.
        count = min(len(in_tier) - len(on_device), self._manager.available - leaving)
        if count <= 0:
            self._manager.drop(on_device)
            return None
        try:
            fresh = self._manager.take(count)
        except NoCapacity:  # `available` is an upper bound
            self._manager.drop(on_device)
            return None
        slots = tier.manager.share(in_tier[len(on_device) :][:count])
        finish = self._promotion_end(tier, tokens, key)
        move = Move(False, on_device + fresh, slots, len(on_device), finish)
        self._promoting[key] = move.ended
        tier.move(move)
        return move.ended

    def _promotion_end(
        self, tier: Tier, tokens: Tokens, key: tuple[Tier, PageId]
    ) -> Callable[[Move], int]:
        def finish(move: Move) -> int:
            del self._promoting[key]
            there = move.first + move.done
            self._manager.publish(tokens[: there * self._size], move.pages[:there])
            self._manager.drop(move.pages)
            tier.manager.drop(move.slots)
            if move.failed:
                tier.manager.prefix.cut(tokens, there)
            tier.stats.promoted_tokens += move.done * self._size
            return move.done * self._size

        return finish

    def swap_out(self, pages: list[PageId], length: int) -> Swap:
        """Copy a sequence's pages to the fastest tier with room, and take over their references.

        Raises: `NoCapacity` if no tier has room; nothing has changed then.
        """
        for tier in self._all:
            try:
                swap = Swap(tier, self._manager, pages, length, self._size)
            except NoCapacity:
                continue
            self._swaps.add(swap)
            return swap
        raise NoCapacity(f"no tier has room for {len(pages)} pages")

    def forget(self, swap: SwappedSequence) -> None:
        """Remove a swap whose sequence has returned or was removed."""
        if isinstance(swap, Swap):
            self._swaps.discard(swap)

    def use(self) -> list[TierUse]:
        """Return the slots by owner, of each tier."""
        return [tier.use for tier in self._all]

    def holders(self) -> Iterator[Sequence[PageId]]:
        """Yield the device pages that moves hold, for the integrity check."""
        for tier in self._all:
            yield from tier.device_holders()

    def check(self) -> None:
        """Check that every slot is free or has exactly its recorded holders. Raises: `Internal`."""
        for tier in self._all:
            tier.check([swap.slots for swap in self._swaps if swap.tier is tier])

    def close(self) -> None:
        """Stop all copies after the current page of each. Call this without the lock."""
        for tier in reversed(self._all):  # each reads the store of the tier above
            tier.close()
