"""Helpers for tests of tiers: caches with tiers, and checks that they are at rest."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

from gated_store import PATIENCE_S
from kv_helpers import memory_cache

from kvcache.cache import KVCache
from kvcache.tiers.store import TierStore
from kvcache.transport import MemoryNetwork


def tiered(*stores: TierStore, pages: int = 8) -> KVCache:
    return memory_cache(MemoryNetwork(), pages, stores=stores)


def quiet(cache: KVCache) -> None:
    """Wait until no copy is pending."""
    give_up = monotonic() + PATIENCE_S
    while True:
        with cache.lock:
            if all(tier.idle for tier in cache.tiers):
                return
        assert monotonic() < give_up, cache.tiers.use()
        threading.Event().wait(0.001)


def at_rest(cache: KVCache) -> None:
    """Check that every page and slot is free or cached, and the managers' integrity."""
    quiet(cache)
    use = cache.page_use()
    assert use.free + use.cached == use.total
    assert not cache.bookkeeping.pages.pool._readers
    assert not cache.tiers._swaps
    for tier in cache.tiers.use():
        assert tier.free + tier.cached == tier.total
        assert tier.swapped == tier.copying == 0
    cache.check_integrity()


@contextmanager
def tiered_caches() -> Iterator[Callable[..., KVCache]]:
    """Return a function that makes caches like `tiered`; at the end each must be at rest."""
    made: list[KVCache] = []

    def make(*stores: TierStore, pages: int = 8) -> KVCache:
        made.append(tiered(*stores, pages=pages))
        return made[-1]

    yield make
    for cache in made:
        at_rest(cache)
        cache.close()
        cache.check_integrity()
