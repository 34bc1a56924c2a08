"""The lease rules that need an engine; `tests/kvcache/lease` has the others."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from engine_helpers import at_rest, collect, generate, prep, running, sending, start

from engine.protocol import (
    BadRequest,
    Draining,
    Extend,
    LeaseExpired,
    MicroserveError,
    Mirror,
    NoCapacity,
    Release,
)
from engine.service.engine import MicroserveEngine
from kvcache.transport import MemoryNetwork
from kvcache.types import SeqId

PROMPT = [(11 * n) % 250 for n in range(70)]
END = len(PROMPT) - 1
Pair = tuple[MicroserveEngine, MicroserveEngine]


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    network = MemoryNetwork()
    async with running(network, name="p") as prefill, running(network, name="d") as decode:
        yield prefill, decode


async def test_draining_refuses_new_work_and_lets_caches_move_away(pair: Pair):
    prefill, decode = pair
    await generate(prefill, PROMPT)
    prefill.draining = True
    with pytest.raises(Draining):
        await prefill.start_generate(start(PROMPT))
    with pytest.raises(Draining):
        prefill.prep_recv(prep(PROMPT, END))
    got = decode.prep_recv(prep(PROMPT, END))
    await prefill.remote_send(sending(PROMPT, 0, END, got.kv_addr))
    decode.release(Release(lease_id=got.lease_id))


async def test_draining_lets_a_running_request_move_away(pair: Pair):
    """Release, send prompt and output, start elsewhere: each token comes exactly once."""
    source, target = pair
    whole = await generate(source, PROMPT, "whole", max_tokens=40)
    stream = await source.start_generate(start(PROMPT, "moves", max_tokens=40))
    output: list[int] = []
    with pytest.raises(MicroserveError, match="released"):
        async for event in stream.events():
            output += event.token_ids
            if len(output) == 20:
                source.draining = True
                source.release(Release(request_id="moves"))
    tokens = PROMPT + output
    got = target.prep_recv(prep(tokens, len(tokens) - 1, "moved"))
    reply = await source.remote_send(
        sending(tokens, got.match_len, len(tokens) - 1, got.kv_addr, "moved")
    )
    assert reply.cached_tokens >= len(tokens) - 1 - 16  # its full pages are still cached
    rest = await generate(
        target, PROMPT, "moved", output=output, lease_id=got.lease_id, max_tokens=40
    )
    assert output + rest == whole


async def test_draining_lets_a_mirrored_request_move_away_and_mirrors_grow(pair: Pair):
    source, replica = pair
    whole = await generate(source, PROMPT, "whole", max_tokens=40)
    got = replica.prep_recv(prep(PROMPT, len(PROMPT), "lease", reserve=10))
    replica.draining = True
    assert replica.extend(Extend(kv_addr=got.kv_addr, reserve=40)).room == len(PROMPT) + 50
    replica.draining = False
    stream = await source.start_generate(
        start(PROMPT, "r", max_tokens=40, mirror=Mirror(kv_addr=got.kv_addr, every=2))
    )
    output: list[int] = []
    with pytest.raises(MicroserveError, match="released"):
        async for event in stream.events():
            output += event.token_ids
            if len(output) == 20:
                source.draining = True
                source.release(Release(request_id="r"))
    rest = await generate(
        replica, PROMPT, "rest", output=output, lease_id=got.lease_id, max_tokens=40
    )
    assert output + rest == whole
    await at_rest(source)


async def test_a_replica_without_renewal_expires(pair: Pair):
    """The mirror ends with its generation, and its lease `lease_ms` later."""
    source, replica = pair
    got = replica.prep_recv(prep(PROMPT, len(PROMPT), "lease", reserve=60, lease_ms=300))
    events = await collect(
        await source.start_generate(
            start(PROMPT, max_tokens=40, mirror=Mirror(kv_addr=got.kv_addr, every=2))
        )
    )
    assert events[-1].mirror is not None and events[-1].mirror.stopped is None
    with pytest.raises(LeaseExpired):
        await generate(
            replica,
            PROMPT,
            "late",
            begin=END + 60,
            lease_id=got.lease_id,
            max_tokens=90,
            output=[1] * 70,
        )
    await at_rest(replica)


async def test_a_send_without_pages_is_refused_at_once():
    network = MemoryNetwork()
    async with running(network, pages=4) as prefill, running(network, name="d") as decode:
        got = decode.prep_recv(prep(PROMPT, END))
        with pytest.raises(BadRequest):  # never expires
            await prefill.remote_send(sending(PROMPT, 0, END, got.kv_addr))
        decode.release(Release(lease_id=got.lease_id))
        others = SeqId(1_000_000)
        prefill.cache.add_sequence(others)
        prefill.cache.grow(others, 40)  # three of the four pages
        got = decode.prep_recv(prep(PROMPT, 60))
        with pytest.raises(NoCapacity):  # now
            await prefill.remote_send(sending(PROMPT, 0, 60, got.kv_addr))
        prefill.cache.remove_sequence(others)
        decode.release(Release(lease_id=got.lease_id))
