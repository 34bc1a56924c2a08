"""Context migration (§3.2, Example 4, Figure 5)."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Annotated

from pydantic import Field

from router import Chunk, Cluster, Request, strategy

__all__ = ["migrate"]

Overload = Annotated[
    int, Field(ge=0, description="excess over the lowest load that moves a prefix (tokens)")
]


@strategy
async def migrate(
    request: Request, cluster: Cluster, *, overload: Overload = 2048
) -> AsyncGenerator[Chunk, None]:
    """Send each request where most of its prompt is cached; copy prefixes off busy engines.

    If that engine has `overload` tokens more work than the least loaded one that can take its KV,
    what it has cached of the prompt is first copied there and committed. So a second engine begins
    to serve a topic that has too many requests for one.
    """
    engine = cluster.engines.longest_prefix(request)
    other = cluster.engines.receiving_from(engine).able("commit").least_loaded()
    if engine.load - other.load > overload:
        cached = engine.cached(request, coming=False)
        async with other.prep_recv(request, end=cached) as kv:
            if kv.match_len < cached:
                await engine.remote_send(request, kv, begin=kv.match_len, end=cached)
            await other.commit(kv)
        engine = other
    async for chunk in engine.start_generate(request, begin=engine.cached(request)):
        yield chunk
