from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from kv_helpers import Clock, memory_cache

from kvcache.cache import KVCache
from kvcache.transport import MemoryNetwork


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def new_cache(clock: Clock) -> Iterator[Callable[..., KVCache]]:
    """Return a function that makes connected caches; at the end each is checked."""
    network, made = MemoryNetwork(), []

    def make(pages: int = 32, **options: object) -> KVCache:
        made.append(memory_cache(network, pages, **{"clock": clock, **options}))
        return made[-1]

    yield make
    for cache in made:
        cache.check_integrity()
        cache.close()


@pytest.fixture
def cache(new_cache: Callable[..., KVCache]) -> KVCache:
    return new_cache()


@pytest.fixture
def pair(new_cache: Callable[..., KVCache]) -> tuple[KVCache, KVCache]:
    """A sender and a receiver."""
    return new_cache(name="sender"), new_cache(name="receiver")
