"""Each request where most of it is cached, unless too much is to do there (§3.2, Example 4)."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Annotated

from pydantic import Field

from router import Chunk, Cluster, Engine, Request, strategy

__all__ = ["cache_aware"]

Weight = Annotated[
    float, Field(ge=0.0, description="what a token queued counts, against one to be computed: 1")
]


@strategy
async def cache_aware(
    request: Request, cluster: Cluster, *, load_weight: Weight = 1.0
) -> AsyncGenerator[Chunk, None]:
    """Each request to the engine with the least of load and of prompt that it lacks, in tokens.

    The rule: least `load_weight * load + (tokens of the prompt that are not cached there)`; of
    equals the one with more cached, then each in its turn. With 0 only the cache counts, and the
    larger the weight, the more of the cache is given up to spread the load. The turns of a session
    stay on one engine by themselves, for that is where their prefix is.
    """

    def cost(engine: Engine) -> tuple[float, int]:
        cached = engine.cached(request)
        return (load_weight * engine.load + len(request.tokens) - cached, -cached)

    engine = cluster.engines.cheapest(cost)
    # What is cached is no work there: `begin` is what the load is counted from.
    async for chunk in engine.start_generate(request, begin=engine.cached(request)):
        yield chunk
