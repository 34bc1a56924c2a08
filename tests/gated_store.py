"""A tier's store whose copies a test can hold up."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from kvcache.cache import KVCache
from kvcache.tiers.store import HostStore
from kvcache.tiers.tier import Tier
from kvcache.types import PageId

PATIENCE_S = 20.0


class Gate:
    """A gate at which copies wait while it is shut."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self._passes = 0
        self.reached = threading.Event()

    def shut(self, after: int = 0) -> None:
        """Let `after` more copies through."""
        self.reached.clear()
        self._passes = after
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    def one(self) -> None:
        """Wait until a copy is at the gate."""
        assert self.reached.wait(PATIENCE_S)

    def pass_(self) -> None:
        if self._passes:
            self._passes -= 1
        elif not self._open.is_set():
            self.reached.set()
            assert self._open.wait(PATIENCE_S)


class GatedStore(HostStore):
    """A host store whose copies can be held up between their start and their end."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self.gate = Gate()
        self.fail_at: int | None = None  # the n-th copy from now, from 0, raises
        self.filled: list[PageId] = []  # slots, in order

    def _pass(self) -> None:
        self.gate.pass_()
        if self.fail_at is not None:
            self.fail_at -= 1
            if self.fail_at < 0:
                self.fail_at = None
                raise OSError(5, "broken")

    def buffer(self, slot: PageId) -> torch.Tensor:
        self.filled.append(slot)
        self._pass()
        return super().buffer(slot)

    def fetch(self, slot: PageId) -> torch.Tensor:
        self._pass()
        return super().fetch(slot)


def close_in_mid_copy(cache: KVCache, store: GatedStore) -> Tier:
    """Close `cache`, one of whose copies is at the gate; return its only tier."""
    (tier,) = cache.tiers
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(cache.close)
        while not tier._closed:
            threading.Event().wait(0.001)
        store.gate.open()
        closing.result(PATIENCE_S)
    return tier
