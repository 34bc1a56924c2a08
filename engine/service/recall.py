"""Before a prompt is matched: what tiers have of it comes back to the pool."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvcache.cache import KVCache

__all__ = ["recall"]

PATIENCE_S = 1.0  # computing is not slower than a tier that takes longer


async def recall(cache: KVCache, tokens: Sequence[int]) -> bool:
    """Wait for `KVCache.promote`, but not for ever; whether there was anything to wait for.

    Cancelled, it leaves nothing behind: what is being copied lands, and is cached.
    """
    promotion = cache.promote(tokens)
    if promotion is None:
        return False
    landed = asyncio.wrap_future(promotion)
    try:
        await asyncio.wait((landed,), timeout=PATIENCE_S)
    finally:
        landed.cancel()  # this wish only: the copy cannot be cancelled
    return True
