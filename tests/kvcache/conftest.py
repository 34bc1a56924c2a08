from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from kv_helpers import Clock, HeldUpCopies, memory_cache

from kvcache.cache import KVCache
from kvcache.transport import MemoryNetwork
from kvcache.transport.mapped import MappedTarget


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
def held_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldUpCopies]:
    """Hold up copies until the test releases them, or ends."""
    held, copy = HeldUpCopies(), MappedTarget.copy

    def held_up_copy(self: MappedTarget, runs: object) -> None:
        held.reached.set()
        assert held.released.wait(10)
        copy(self, runs)  # type: ignore[arg-type]

    monkeypatch.setattr(MappedTarget, "copy", held_up_copy)
    yield held
    held.released.set()


@pytest.fixture
def cache(new_cache: Callable[..., KVCache]) -> KVCache:
    return new_cache()


@pytest.fixture
def pair(new_cache: Callable[..., KVCache]) -> tuple[KVCache, KVCache]:
    """A sender and a receiver."""
    return new_cache(name="sender"), new_cache(name="receiver")
