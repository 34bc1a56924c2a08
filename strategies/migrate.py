"""Context migration (§3.2, Example 4, Figure 5)."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Annotated

from pydantic import Field

from router import Chunk, Cluster, Request, strategy

__all__ = ["migrate"]

Overload = Annotated[
    int, Field(ge=0, description="load beyond the least loaded engine's that is too much (tokens)")
]


@strategy
async def migrate(
    request: Request, cluster: Cluster, *, overload: Overload = 2048
) -> AsyncGenerator[Chunk, None]:
    """Each request to the engine that has most of its prompt cached; contexts go where room is.

    Where that engine has `overload` tokens more to do than the least loaded one, what it has cached
    of the prompt is moved there first and kept: so an engine begins to serve a topic that another
    one has too many requests of.
    """
    engine = cluster.engines.longest_prefix(request)
    other = cluster.engines.least_loaded()
    if engine.load - other.load > overload:
        cached = engine.cached(request, coming=False)
        async with other.prep_recv(request, end=cached) as kv:
            if kv.match_len < cached:
                await engine.remote_send(request, kv, begin=kv.match_len, end=cached)
            await other.commit(kv)
        engine = other
    async for chunk in engine.start_generate(request, begin=engine.cached(request)):
        yield chunk
