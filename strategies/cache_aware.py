"""Each request where most of it is cached, unless too much is to do there (§3.2, Example 4)."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Annotated

from pydantic import Field

from router import Chunk, Cluster, Engine, Request, strategy

__all__ = ["cache_aware"]

Weight = Annotated[
    float, Field(ge=0.0, description="what a token queued there counts; one that it lacks counts 1")
]


@strategy
async def cache_aware(
    request: Request, cluster: Cluster, *, load_weight: Weight = 0.5
) -> AsyncGenerator[Chunk, None]:
    """Each request to the engine with the least to do first, and least of its prompt to compute.

    The rule: least `load_weight * load + lacking`, in tokens: the work queued there, and what is
    not cached there of the prompt; of equals the one with more cached, then each in its turn. What
    is queued delays this request; what is lacking delays it and also those behind it: hence 0.5.
    0 looks at the cache alone; the larger the weight, the sooner a busy engine's cache is given up.
    The turns of a session stay on one engine by themselves, for that is where their prefix is.
    """

    def cost(engine: Engine) -> tuple[float, int]:
        cached = engine.cached(request)
        return (load_weight * engine.load + len(request.tokens) - cached, -cached)

    engine = cluster.engines.cheapest(cost)
    # What is cached is no work there: `begin` is what the load is counted from.
    async for chunk in engine.start_generate(request, begin=engine.cached(request)):
        yield chunk
