"""Balanced prefill-decode disaggregation (§3.3, Figure 6)."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Annotated, Literal

from pydantic import Field

from router import Chunk, Cluster, Request, strategy
from strategies.controller import Controller

__all__ = ["balanced"]

Share = Annotated[float, Field(ge=0.0, le=1.0)]
Ratio = Annotated[
    Share | Literal["auto"],
    Field(
        description="the decode engine's share of the prefill; auto: by the work of both engines"
    ),
]


@strategy
async def balanced(
    request: Request, cluster: Cluster, *, ratio: Ratio = 0.1
) -> AsyncGenerator[Chunk, None]:
    """Prefill on one engine, except for the last `ratio` of the prompt on the decode engine.

    The decode engine computes its share fused with the decode steps of its other requests. 0 is
    `prefill_decode`, 1 leaves all to the decode engine. `auto` divides each prompt so that it
    delays other requests least (`strategies/controller.py` has the rule).
    """
    decode = cluster.decode.able("prep_recv").least_loaded()
    prefill = cluster.prefill.sending_to(decode).least_loaded(exclude=decode)
    last = len(request.tokens) - 1  # the decode engine always computes the last token: it samples
    if ratio != "auto":
        end = min(last, round(len(request.tokens) * (1.0 - ratio)))
        async with decode.prep_recv(request, end=end) as kv:
            if kv.match_len < end:
                await prefill.remote_send(request, kv, begin=kv.match_len, end=end)
            async for chunk in decode.start_generate(request, begin=end, kv=kv):
                yield chunk
        return
    async with decode.prep_recv(request, end=last) as kv:
        known = max(kv.match_len, prefill.cached(request, coming=False))  # needs no computation
        with cluster.state(Controller).divide(
            len(request.tokens) - known,
            prefill=prefill.id,
            decode=decode.id,
            prefills=[engine.id for engine in cluster.prefill],
            decodes=[engine.id for engine in cluster.decode],
        ) as division:
            end = known + division.prefill_tokens
            if kv.match_len < end:
                sent = await prefill.remote_send(request, kv, begin=kv.match_len, end=end)
                division.sent(sent.computed_tokens)
            async for chunk in decode.start_generate(request, begin=end, kv=kv):
                division.received(chunk)
                yield chunk
