"""The limits of sends and generations, and what is left of them if the step loop has died."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
from engine_helpers import collect, generate, prep, running, running_pair, sending, start
from held_copies import held_copies
from waiting import until

from engine.execution import released_ids
from engine.execution.released_ids import ReleasedIds
from engine.protocol import DuplicateRequest, Internal, LeaseExpired, NoCapacity, Release
from engine.service.engine import MicroserveEngine

PROMPT = [(11 * n) % 250 for n in range(70)]
END = len(PROMPT) - 1
Pair = tuple[MicroserveEngine, MicroserveEngine]


class GatedSteps:
    """Steps that wait at their beginning from `shut` until the end of the block."""

    def __init__(self, engine: MicroserveEngine) -> None:
        self.reached = threading.Event()  # a step waits
        self._opened = threading.Event()
        self._runner = engine.loop.stepper._runner
        self._run = self._runner.run

    def shut(self) -> None:
        self._runner.run = self._gated  # type: ignore[method-assign]

    def _gated(self, chunks: Any) -> Any:
        self.reached.set()
        assert self._opened.wait(60)
        return self._run(chunks)

    def __enter__(self) -> GatedSteps:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.set()


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    """Two engines that admit one generation and one send at a time."""
    async with running_pair(max_live=1) as engines:
        yield engines


def break_loop(engine: MicroserveEngine) -> None:
    """Let the step loop die in its next step."""
    engine._scheduler.plan = lambda: 1 / 0  # type: ignore[assignment,method-assign,return-value]


async def dead(engine: MicroserveEngine) -> None:
    break_loop(engine)
    engine.loop.flush()
    await until(lambda: not engine.loop.alive)


@pytest.mark.parametrize("when", ["before", "during"])
async def test_a_send_of_a_dead_loop_keeps_no_pages(pair: Pair, when: str):
    prefill, decode = pair
    got = decode.prep_recv(prep(PROMPT, END))
    if when == "before":
        await dead(prefill)
    else:
        break_loop(prefill)
    with pytest.raises(Internal, match="stopped"):
        await prefill.remote_send(sending(PROMPT, 0, END, got.kv_addr))
    assert prefill.puts_in_flight == 0
    await until(lambda: prefill.cache.page_use().active == 0)
    decode.release(Release(lease_id=got.lease_id))


async def test_a_send_of_a_dead_loop_keeps_its_pages_while_they_are_read(pair: Pair):
    prefill, decode = pair
    await generate(prefill, PROMPT, max_tokens=1)
    got = decode.prep_recv(prep(PROMPT, 64))
    with held_copies() as held:
        call = asyncio.create_task(prefill.remote_send(sending(PROMPT, 0, 64, got.kv_addr)))
        await until(held.reached.is_set)
        await dead(prefill)
        with pytest.raises(Internal, match="stopped"):
            await call
        assert prefill.cache.page_use().active == 4
    await until(lambda: prefill.cache.page_use().active == 0)
    decode.release(Release(lease_id=got.lease_id))


async def test_a_generation_of_a_dead_loop_keeps_neither_pages_nor_its_place(pair: Pair):
    _, decode = pair
    got = decode.prep_recv(prep(PROMPT, END))
    await dead(decode)
    for _ in range(2):
        with pytest.raises(Internal, match="stopped"):
            await decode.start_generate(start(PROMPT, "other"))
    with pytest.raises(Internal, match="stopped"):
        await decode.start_generate(start(PROMPT, begin=0, lease_id=got.lease_id))
    assert len(decode.generations) == 0
    use = decode.cache.page_use()
    assert use.free == use.total


async def test_generations_that_wait_for_their_kv_count_as_live(pair: Pair):
    _, decode = pair
    got = decode.prep_recv(prep(PROMPT, END))
    call = start(PROMPT, begin=END, lease_id=got.lease_id)
    waiting = asyncio.create_task(decode.start_generate(call))
    await until(lambda: decode.waiting == 1)
    with pytest.raises(NoCapacity):
        await decode.start_generate(start(PROMPT, "other"))
    decode.release(Release(lease_id=got.lease_id))
    with pytest.raises(LeaseExpired):
        await waiting
    assert len(await generate(decode, PROMPT, "other")) == 8


async def test_sends_that_wait_for_their_claim_count_as_live(pair: Pair):
    prefill, decode = pair
    got = decode.prep_recv(prep(PROMPT, END))
    (lease,) = decode.cache.leases()
    region = decode.cache.transport.region
    assert region.try_acquire_right(lease.slot)  # the claim has to wait
    first = asyncio.create_task(prefill.remote_send(sending(PROMPT, 0, END, got.kv_addr)))
    await until(lambda: prefill.puts_in_flight == 1)
    with pytest.raises(DuplicateRequest):
        await prefill.remote_send(sending(PROMPT, 0, END, got.kv_addr))
    with pytest.raises(NoCapacity):
        await prefill.remote_send(sending(PROMPT, 0, END, got.kv_addr, "other"))
    region.release_right(lease.slot)
    assert (await first).sent_tokens == END
    decode.release(Release(lease_id=got.lease_id))


async def test_a_released_choice_that_waits_for_its_prompt_computes_nothing():
    """Nobody reads its stream, and the step loop learns of its end by the release alone."""
    async with running(token_budget=16) as engine:
        run, gate = engine.loop.stepper._runner.run, threading.Event()

        def gated(chunks: Any) -> Any:
            assert gate.wait(20)
            return run(chunks)

        engine.loop.stepper._runner.run = gated  # type: ignore[method-assign]
        parent = await engine.start_generate(start(PROMPT, "c0", forks=1, max_tokens=4))
        child = await engine.start_generate(start(PROMPT, "c1", fork_of="c0", max_tokens=400))
        engine.release(Release(request_id="c1"))
        gate.set()
        async for _ in parent.events():
            pass
        await engine.flush()
        assert child._generation.generated == 0
        assert engine.running == engine.waiting == 0


def test_the_latest_released_ids_are_remembered(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(released_ids, "REMEMBERED", 2)
    released = ReleasedIds()
    for name in ("a", "b", "a", "c"):
        released.add(name)
    released.check("b")
    for name in ("a", "c"):
        with pytest.raises(DuplicateRequest):
            released.check(name)


async def test_a_reply_counts_what_was_sent_from_the_cache(pair: Pair):
    prefill, decode = pair
    await generate(prefill, PROMPT, max_tokens=1)  # 64 tokens stay cached
    got = decode.prep_recv(prep(PROMPT, END))
    counts = []
    for begin, end in ((0, 32), (32, 68), (68, END)):
        reply = await prefill.remote_send(sending(PROMPT, begin, end, got.kv_addr))
        counts.append((reply.sent_tokens, reply.cached_tokens, reply.computed_tokens))
    assert counts == [(32, 32, 0), (36, 32, 4), (1, 0, 5)]
    decode.release(Release(lease_id=got.lease_id))


async def test_a_reply_does_not_wait_for_the_step_under_way(pair: Pair):
    """A generation can start from the lease as soon as the reply is there."""
    prefill, decode = pair
    stepper = prefill.loop.stepper
    got = decode.prep_recv(prep(PROMPT, END))
    with GatedSteps(prefill) as gate:
        with held_copies():
            call = asyncio.create_task(prefill.remote_send(sending(PROMPT, 0, END, got.kv_addr)))
            await until(lambda: stepper._closing)
            gate.shut()
            stream = await prefill.start_generate(start([1, 2, 3], "other"))
            await until(gate.reached.is_set)
        async with asyncio.timeout(20):
            assert (await call).sent_tokens == END
        assert prefill.puts_in_flight == 0 and prefill.cache.prefix_tokens == 64
        tokens = await generate(decode, PROMPT, begin=END, lease_id=got.lease_id)
        assert prefill.loop.stats.steps == 1
    await collect(stream)
    assert tokens == await generate(prefill, PROMPT)


async def test_a_release_ends_a_send_during_the_step_under_way(pair: Pair):
    """Its call fails, and its pages are free, when no write reads them any more."""
    prefill, decode = pair
    stepper = prefill.loop.stepper
    got = decode.prep_recv(prep(PROMPT, END))
    with GatedSteps(prefill) as gate:
        with held_copies() as held:
            call = asyncio.create_task(prefill.remote_send(sending(PROMPT, 0, END, got.kv_addr)))
            await until(lambda: stepper._closing)
            await until(held.reached.is_set)
            gate.shut()
            stream = await prefill.start_generate(start([1, 2, 3], "other"))
            await until(gate.reached.is_set)
            prefill.release(Release(request_id="r"))
            assert prefill.cache.page_use().active == 6
        with pytest.raises(Internal, match="aborted"):
            async with asyncio.timeout(20):
                await call
        assert prefill.cache.page_use().active == 1 and prefill.cache.prefix_tokens == 0
    await collect(stream)
    decode.release(Release(lease_id=got.lease_id))
