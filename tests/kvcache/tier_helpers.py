"""What the tests of tiers share: stores that wait when told to, caches over them, and rest."""

from __future__ import annotations

import threading
from time import monotonic

import torch
from kv_helpers import memory_cache

from kvcache.cache import KVCache
from kvcache.tier_store import HostStore, Store
from kvcache.transport import MemoryNetwork
from kvcache.types import PageId

PATIENCE_S = 20.0


class Gate:
    """Where a copy waits while it is shut, and says so."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self.reached = threading.Event()

    def shut(self) -> None:
        self.reached.clear()
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    def one(self) -> None:
        """Wait until a copy is at the gate."""
        assert self.reached.wait(PATIENCE_S)

    def pass_(self) -> None:
        if not self._open.is_set():
            self.reached.set()
            assert self._open.wait(PATIENCE_S)


class GatedStore(HostStore):
    """The host's memory, whose copies can be held up between their beginning and their end."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self.gate = Gate()
        self.fail_at: int | None = None  # the n-th copy from now, from 0, raises

    def _pass(self) -> None:
        self.gate.pass_()
        if self.fail_at is not None:
            self.fail_at -= 1
            if self.fail_at < 0:
                self.fail_at = None
                raise OSError(5, "broken")

    def buffer(self, slot: PageId) -> torch.Tensor:
        self._pass()
        return super().buffer(slot)

    def fetch(self, slot: PageId) -> torch.Tensor:
        self._pass()
        return super().fetch(slot)


def tiered(*stores: Store, pages: int = 8) -> KVCache:
    return memory_cache(MemoryNetwork(), pages, stores=stores)


def quiet(cache: KVCache) -> None:
    """Wait until nothing is left to copy."""
    give_up = monotonic() + PATIENCE_S
    while True:
        with cache.lock:
            if all(tier.quiet for tier in cache.tiers):
                return
        assert monotonic() < give_up, cache.tiers.use()
        threading.Event().wait(0.001)


def at_rest(cache: KVCache) -> None:
    """Every page and every slot is free or cached, and the books prove it."""
    quiet(cache)
    use = cache.page_use()
    assert use.free + use.cached == use.total
    for tier in cache.tiers.use():
        assert tier.free + tier.cached == tier.total
        assert tier.swapped == tier.copying == 0
    cache.check_integrity()
