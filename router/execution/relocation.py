"""A generation leaves its engine, which lives: its KV goes along, and no prefill is repeated."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from router.base.request import Chunk, Request
from router.legs.attempt import Attempt
from router.legs.token_stream import TokenStream
from router.strategy.cluster import Cluster
from router.strategy.engine import Engine

__all__ = ["relocated"]


async def relocated(
    attempt: Attempt, cluster: Cluster, request: Request, origin: TokenStream
) -> AsyncGenerator[Chunk, None]:
    """What `origin`, which has been ended, would have emitted after `request.output`.

    It goes on from its replica, if that is up to date. Else the old engine puts what it has cached,
    the full pages of prompt and output, at another one, which computes the rest: a page at most.
    What the old engine has lost of it, it computes again. Raises what the calls raise.
    """
    old, mirror = Engine(attempt, origin.backend), origin.mirror
    attempt.alone = False  # the old one takes part, though it takes no new work
    kv = cluster.replica
    if kv and mirror and len(request.tokens) - kv.match_len <= 2 * mirror.every + 1:
        async for chunk in kv.engine.start_generate(request, kv=kv, mirror=mirror):
            yield chunk
        return
    if origin.backend.usable:  # it was another of the attempt's engines that had to be left
        async for chunk in old.start_generate(request, mirror=mirror):
            yield chunk
        return
    new = cluster.decode.least_loaded(exclude=old)
    page = attempt.runtime.registry.model.info.page_size
    end = (len(request.tokens) - 1) // page * page
    async with new.prep_recv(request, end=end) as kv:
        if kv.match_len < end:
            await old.remote_send(request, kv, begin=kv.match_len, end=end)
        async for chunk in new.start_generate(request, begin=end, kv=kv, mirror=mirror):
            yield chunk
