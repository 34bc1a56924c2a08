"""Data parallel (§3.2, Figure 2)."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from router import Chunk, Cluster, Request, strategy

__all__ = ["data_parallel"]


@strategy
async def data_parallel(request: Request, cluster: Cluster) -> AsyncGenerator[Chunk, None]:
    """Send each request to one engine, in round-robin order."""
    engine = cluster.engines.round_robin()
    async for chunk in engine.start_generate(request, begin=0):
        yield chunk
