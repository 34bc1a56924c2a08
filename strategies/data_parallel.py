"""Data parallel (§3.2, Figure 2)."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from router import Chunk, Cluster, Request, strategy

__all__ = ["data_parallel"]


@strategy
async def data_parallel(request: Request, cluster: Cluster) -> AsyncGenerator[Chunk, None]:
    """Each request to one engine, in round-robin fashion."""
    engine = cluster.engines.round_robin()
    async for chunk in engine.start_generate(request, begin=0):
        yield chunk
