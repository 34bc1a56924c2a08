"""Promotion: cached KV moves from the tiers back into the pool before a prompt is matched."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvcache.cache import KVCache

__all__ = ["promote"]

TIMEOUT_S = 1.0  # computing a prompt is faster than a tier that takes longer


async def promote(cache: KVCache, tokens: Sequence[int]) -> bool:
    """Wait up to `TIMEOUT_S` for `KVCache.promote`; return whether there was anything to wait for.

    Cancellation leaves nothing to undo: copies under way complete and are cached.
    """
    promotion = cache.promote(tokens)
    if promotion is None:
        return False
    promoted = asyncio.wrap_future(promotion)
    try:
        await asyncio.wait((promoted,), timeout=TIMEOUT_S)
    finally:
        promoted.cancel()  # stops the waiting only: the copy cannot be cancelled
    return True
