"""The tiers below the device's pool, fastest first: prefixes come back, sequences go and come."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

import numpy as np
import torch

from kvcache.errors import NoCapacity
from kvcache.pages.page_manager import PageManager
from kvcache.pages.prefix_tree import Tokens
from kvcache.sequences.swapping import SwappedSequence
from kvcache.tiers.store import DevicePages, TierStore
from kvcache.tiers.swap import Swap
from kvcache.tiers.tier import Level, Move, Tier, TierUse
from kvcache.types import PageId

__all__ = ["Tiers"]


class DeviceLevel:
    """The `Level` of the device's own pages."""

    def __init__(self, manager: PageManager, pages: DevicePages) -> None:
        self.manager = manager
        self._pages = pages

    def read(self, page: PageId, out: torch.Tensor) -> None:
        self._pages.read(page, out)


class Tiers:
    """All tiers of one cache, whose lock guards it. Each copies behind from the one above it."""

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
            above: Level = self._all[-1] if self._all else DeviceLevel(manager, device)
            tier = Tier(store, device, above, page_size, lock)
            above.manager.lower_tier = tier
            self._all.append(tier)

    def __iter__(self) -> Iterator[Tier]:
        return iter(self._all)

    @property
    def kept(self) -> bool:
        """Whether one of them outlives the process."""
        return any(tier.kept for tier in self._all)

    def promote(self, tokens: Tokens, leaving: int) -> Future[int] | None:
        """See `KVCache.promote`; `leaving` pages of the device stay available."""
        if not self._all:
            return None
        tokens = np.asarray(tokens, dtype=np.int32)
        here = self._manager.prefix.match(tokens)
        tier, there = None, here
        for each in self._all:
            found = each.manager.prefix.match(tokens)
            if len(found) > len(there):
                tier, there = each, found
        if tier is None:
            return None
        key = (tier, there[len(here)])
        if key in self._promoting:
            return self._promoting[key]
        here = self._manager.share(here)
        # After sharing, so that taking pages cannot evict what the rest continues.
        count = min(len(there) - len(here), self._manager.available - leaving)
        if count <= 0:
            self._manager.drop(here)
            return None
        try:
            fresh = self._manager.take(count)
        except NoCapacity:  # fewer were available than it said
            self._manager.drop(here)
            return None
        slots = tier.manager.share(there[len(here) :][:count])
        landing = self._landing(tier, tokens, key)
        move = Move(False, here + fresh, slots, len(here), landing)
        self._promoting[key] = move.ended
        tier.move(move)
        return move.ended

    def _landing(
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
        """Copy a sequence's pages, whose references are given, to the fastest tier with room.

        Raises `NoCapacity`, changing nothing.
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
        """A swapped sequence is back, or was let go of."""
        if isinstance(swap, Swap):
            self._swaps.discard(swap)

    def use(self) -> list[TierUse]:
        """Slots by owner, of each tier."""
        return [tier.use for tier in self._all]

    def holders(self) -> Iterator[Sequence[PageId]]:
        """Pages of the device that are being copied, for the proof of ownership."""
        for tier in self._all:
            yield from tier.device_holders()

    def check(self) -> None:
        """Prove that every slot is free or held by whom the manager say. Raises `Internal`."""
        for tier in self._all:
            tier.check([swap.slots for swap in self._swaps if swap.tier is tier])

    def close(self) -> None:
        """End all copies, each after the page under way. Call it without the lock."""
        for tier in self._all:
            tier.close()
