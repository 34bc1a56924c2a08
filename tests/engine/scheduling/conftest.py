from __future__ import annotations

from collections.abc import Iterator

import pytest
from engine_helpers import make_cache
from scheduler_steps import Make

from engine.scheduling.scheduler import Scheduler
from kvcache.cache import KVCache


@pytest.fixture
def make() -> Iterator[Make]:
    """Make schedulers over pools whose integrity is checked at the end."""
    caches: list[KVCache] = []

    def build(
        pages: int = 64,
        *,
        budget: int = 64,
        max_batch: int = 16,
        slowdown: float = 0.0,
        lend_pages: int = 0,
        loan_s: float = 30.0,
    ) -> tuple[Scheduler, KVCache]:
        cache = make_cache(pages=pages, lend_pages=lend_pages, loan_s=loan_s)
        caches.append(cache)
        scheduler = Scheduler(
            cache, token_budget=budget, max_batch=max_batch, decode_slowdown=slowdown
        )
        return scheduler, cache

    yield build
    for cache in caches:
        cache.check_integrity()
        cache.close()
