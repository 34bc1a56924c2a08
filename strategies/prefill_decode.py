"""Prefill-decode disaggregation, aware of the context cache (§3.2, Figures 3 and 4)."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from router import Chunk, Cluster, Request, strategy

__all__ = ["prefill_decode"]


@strategy
async def prefill_decode(request: Request, cluster: Cluster) -> AsyncGenerator[Chunk, None]:
    """Prefill on one engine and decode on another (xPyD: the least loaded of each)."""
    decode = cluster.decode.able("prep_recv").least_loaded()
    prefill = cluster.prefill.sending_to(decode).least_loaded(exclude=decode)
    end = len(request.tokens) - 1
    async with decode.prep_recv(request, end=end) as kv:
        if kv.match_len < end:
            await prefill.remote_send(request, kv, begin=kv.match_len, end=end)
        async for chunk in decode.start_generate(request, begin=end, kv=kv):
            yield chunk
