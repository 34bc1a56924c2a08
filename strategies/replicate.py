"""Fault replication: generations survive the loss of their engine (DéjàVu, ring replication)."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Annotated

from pydantic import Field

from router import Chunk, Cluster, Mirror, Request, strategy

__all__ = ["replicate"]

Every = Annotated[int, Field(ge=1, le=4096, description="tokens between two puts to the replica")]


@strategy
async def replicate(
    request: Request, cluster: Cluster, *, every: Every = 16
) -> AsyncGenerator[Chunk, None]:
    """Keep each request's KV on the next engine of a ring too, and resume there after a failure.

    When an engine dies or hangs, at most `2 * every + 1` tokens are computed again, and a new
    replica is made at once. If two neighbours die together, all tokens are computed again.
    """
    kv = cluster.replica  # set if the request's engine has died
    engine = kv.engine if kv else cluster.engines.least_loaded()
    async for chunk in engine.start_generate(request, kv=kv, mirror=Mirror(every)):
        yield chunk
