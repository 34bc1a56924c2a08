"""Sends each request where most of it is cached, unless that engine is busy (§3.2, Example 4)."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Annotated

from pydantic import Field

from router import Chunk, Cluster, Engine, Request, strategy

__all__ = ["cache_aware"]

Weight = Annotated[
    float, Field(ge=0.0, description="cost of a queued token; a token that is not cached costs 1")
]


@strategy
async def cache_aware(
    request: Request, cluster: Cluster, *, load_weight: Weight = 0.5
) -> AsyncGenerator[Chunk, None]:
    """Send each request to the engine with the least work queued and least of it to compute.

    It minimises `load_weight * load + missing`, in tokens: the work queued on an engine, and the
    part of the prompt that is not cached there. Ties go to the engine with more cached, then take
    turns. Queued work delays only this request, missing tokens also those behind it: hence 0.5. 0
    considers the cache alone; the larger the weight, the sooner a busy engine's cache is given up.
    The requests of a session stay on one engine, because their prefix is there.
    """

    def cost(engine: Engine) -> tuple[float, int]:
        cached = engine.cached(request)
        return (load_weight * engine.load + len(request.tokens) - cached, -cached)

    engine = cluster.engines.cheapest(cost)
    # The load counts the tokens from `begin` on: cached tokens are no work.
    async for chunk in engine.start_generate(request, begin=engine.cached(request)):
        yield chunk
