"""The lease rules that need an engine; `tests/kvcache/lease` has the others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from engine_helpers import (
    at_rest,
    collect,
    generate,
    prep,
    running,
    running_pair,
    sending,
    start,
    tiny_layout,
)
from waiting import until

from engine.execution import stepper
from engine.protocol import (
    BadRequest,
    Draining,
    Extend,
    LeaseExpired,
    MicroserveError,
    Mirror,
    NoCapacity,
    Pin,
    Release,
)
from engine.scheduling import Chunk, Job
from engine.service.engine import MicroserveEngine
from kvcache.lease.put import Put
from kvcache.tiers.store import HostStore
from kvcache.transport import MemoryNetwork
from kvcache.types import SeqId

PROMPT = [(11 * n) % 250 for n in range(70)]
END = len(PROMPT) - 1
Pair = tuple[MicroserveEngine, MicroserveEngine]


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    async with running_pair() as engines:
        yield engines


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


async def test_a_cancelled_migration_writes_nothing_further():
    """All of it is cached, so its writes are queued before it can be cancelled."""
    network = MemoryNetwork()
    async with running(network, name="p") as source, running(network, name="d") as target:
        await generate(source, PROMPT)
        got = target.prep_recv(prep(PROMPT, 64))
        (lease,) = target.cache.leases()
        region = target.cache.transport.region
        puts: list[Put] = []
        open_put = source.cache.open_put

        def open_and_hold_up(kv_addr: str, prompt: list[int], begin: int, end: int) -> Put:
            puts.append(open_put(kv_addr, prompt, begin, end))
            assert region.try_acquire_right(lease.slot)
            return puts[0]

        source.cache.open_put = open_and_hold_up  # type: ignore[method-assign,assignment]
        sending_all = asyncio.create_task(
            source.remote_send(sending(PROMPT, 0, 64, got.kv_addr, "moves"))
        )
        await until(lambda: source.loop.stepper._closing)
        sending_all.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending_all
        region.release_right(lease.slot)
        await at_rest(source)
        assert puts[0].bytes_sent == 0
        assert target.cache.lease(lease.lease_id).landed == 0
        target.release(Release(lease_id=got.lease_id))


async def test_a_prompt_without_room_beside_pinned_prefixes_is_refused_at_once():
    async with running(pages=16) as engine:
        prefix = [(7 * n) % 250 for n in range(7 * 16)]
        await generate(engine, [*prefix, 1], max_tokens=1)
        assert engine.pin(Pin(prompt=prefix)) == len(prefix)
        other = [(5 * n + 1) % 250 for n in range(150)]  # ten pages; nine are left
        with pytest.raises(NoCapacity, match="pin 7"):
            await engine.start_generate(start(other))
        tokens = await generate(engine, [*prefix, *other[:90]])  # 13 pages; it shares seven
        assert len(tokens) == 8
        engine.unpin(Pin(prompt=prefix))
        assert len(await generate(engine, other)) == 8


async def test_choices_of_a_prompt_that_fills_a_small_pool_all_end():
    """Each of them fits, but not two at a time."""
    async with running(pages=8) as engine:
        options = {"max_tokens": 50, "temperature": 1.0}
        first = start(PROMPT, "c0", forks=3, **options)
        streams = [await engine.start_generate(first)]
        streams += [
            await engine.start_generate(
                start(PROMPT, f"c{n}", fork_of="c0", choice=n, seed=n, **options)
            )
            for n in range(1, 4)
        ]
        events = await asyncio.gather(*map(collect, streams))
        assert [each[-1].finish_reason for each in events] == ["length"] * 4
        assert engine.preemptions > 0


async def test_a_request_that_the_pool_cannot_hold_is_a_bad_request():
    async with running(pages=8) as engine:
        assert engine.context_length == 128
        with pytest.raises(BadRequest, match="KV pool") as caught:
            await engine.start_generate(start(PROMPT, max_tokens=59))
        assert caught.value.code == "context_length_exceeded"
        assert len(await generate(engine, PROMPT, max_tokens=58)) == 58


async def test_prompts_beyond_the_longest_context_are_bad_requests():
    async with running(context=80) as engine:
        assert engine.context_length == 80
        for call in (start([1] * 81), start([1] * 75, max_tokens=6)):
            with pytest.raises(BadRequest, match="context of 80") as caught:
                await engine.start_generate(call)
            assert caught.value.code == "context_length_exceeded"
        with pytest.raises(BadRequest, match="context of 80"):
            engine.prep_recv(prep([1] * 81, 10))
        assert len(await generate(engine, [1] * 75, max_tokens=5)) == 5


async def test_a_swapped_generation_is_computed_again_where_pins_keep_it_out(
    monkeypatch: pytest.MonkeyPatch,
):
    """Swapped, it needs pages of its own for the pinned prefix; computed again, it shares them."""
    monkeypatch.setattr(stepper, "STUCK_SWEEPS", 3)
    async with running(pages=16, stores=[HostStore(tiny_layout(1), 32)]) as engine:
        prefix = [(7 * n) % 250 for n in range(7 * 16)]
        alone = await generate(engine, prefix, max_tokens=70)
        engine.pin(Pin(prompt=prefix))
        stream = await engine.start_generate(start(prefix, max_tokens=70))
        reading = asyncio.create_task(collect(stream))
        await until(lambda: engine.running)
        scheduler, (job,) = engine._scheduler, engine._scheduler.running
        plan = scheduler.plan

        def preempt_once() -> list[tuple[Job, Chunk]]:
            if len(job.tokens) > 160 and job.started and not scheduler.preemptions:
                scheduler._preempt(job)
            return plan()

        scheduler.plan = preempt_once  # type: ignore[method-assign]
        events = await reading
        assert scheduler.preemptions == 1
        assert [token for event in events for token in event.token_ids] == alone
        engine.unpin(Pin(prompt=prefix))
