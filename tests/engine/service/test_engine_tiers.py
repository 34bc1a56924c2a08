"""Engines with pools that are too small for their work; tiers do not change their tokens."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from pathlib import Path
from time import monotonic

import psutil
import pytest
from engine_helpers import (
    at_rest,
    collect,
    generate,
    generation,
    make_cache,
    prep,
    running,
    sending,
    start,
    tiny_layout,
)
from engine_process import EngineProcess
from gated_store import GatedStore

from engine.protocol import DuplicateRequest, Release
from engine.scheduling.jobs import Generation
from engine.scheduling.scheduler import Scheduler
from engine.service.engine import MicroserveEngine
from kvcache.cache import KVCache
from kvcache.tiers.disk_store import DiskStore
from kvcache.tiers.store import HostStore, TierStore
from kvcache.transport import MemoryNetwork
from kvcache.types import SeqId

LAYOUT = tiny_layout(1)
PROMPTS = [[(7 * n + 31 * p) % 250 for n in range(20 + 9 * p)] for p in range(6)]
LONG = [(11 * n) % 250 for n in range(100)]
OTHERS = [[(13 * n + 5 * p) % 250 for n in range(90)] for p in range(1, 5)]
MANY = {"max_tokens": 60}


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    """Return the tokens of each prompt on an engine of its own."""

    async def run() -> list[list[int]]:
        outputs = []
        for prompt in PROMPTS:
            async with running() as engine:
                outputs.append(await generate(engine, prompt, **MANY))
        return outputs

    return asyncio.run(run())


async def together(engine: MicroserveEngine) -> list[list[int]]:
    return await asyncio.gather(
        *(generate(engine, prompt, f"r{n}", **MANY) for n, prompt in enumerate(PROMPTS))
    )


def stats(engine: MicroserveEngine) -> list[tuple[int, int]]:
    return [(tier.stats.swaps_out, tier.stats.swaps_in) for tier in engine.cache.tiers]


# Under pressure


@pytest.mark.slow
async def test_tokens_do_not_depend_on_swaps(alone: list[list[int]]):
    async with running(pages=12, stores=[HostStore(LAYOUT, 64)]) as engine:
        assert await together(engine) == alone
        await at_rest(engine)
        ((out, back),) = stats(engine)
        assert out == back == engine.preemptions > 2


async def test_tokens_do_not_depend_on_swaps_to_disk(alone: list[list[int]], tmp_path: Path):
    async with running(pages=12, stores=[DiskStore(LAYOUT, 64, tmp_path)]) as engine:
        assert await together(engine) == alone
        await at_rest(engine)
        ((out, back),) = stats(engine)
        assert out == back == engine.preemptions > 2


async def test_tokens_do_not_depend_on_recomputation(alone: list[list[int]]):
    stores = [HostStore(LAYOUT, 64)]
    async with running(pages=12, stores=stores, swap=False) as engine:
        assert await together(engine) == alone
        assert stats(engine) == [(0, 0)]
        assert engine.preemptions > 2


async def test_tokens_do_not_depend_on_a_small_tier(alone: list[list[int]]):
    async with running(pages=12, stores=[HostStore(LAYOUT, 5)]) as engine:
        assert await together(engine) == alone
        ((out, _),) = stats(engine)
        assert engine.preemptions > out


async def test_sampled_tokens_do_not_depend_on_swaps(alone: list[list[int]]):
    async def drawn(engine: MicroserveEngine) -> list[list[int]]:
        sampled = {**MANY, "temperature": 1.0, "seed": 7}
        return await asyncio.gather(
            *(generate(engine, prompt, f"r{n}", **sampled) for n, prompt in enumerate(PROMPTS))
        )

    async with running() as engine:
        expected = await drawn(engine)
    async with running(pages=12, stores=[HostStore(LAYOUT, 64)]) as engine:
        assert await drawn(engine) == expected
        assert engine.preemptions > 2


@pytest.mark.parametrize("what", ["buffer", "fetch"])
async def test_tokens_do_not_depend_on_lost_pages(alone: list[list[int]], what: str):
    """Every third page cannot be written or read."""

    class Broken(HostStore):
        calls = 0

    def broken(self: Broken, slot: int) -> object:
        Broken.calls += 1
        if Broken.calls % 3 == 0:
            raise OSError(5, "broken")
        return getattr(HostStore, what)(self, slot)

    setattr(Broken, what, broken)
    async with running(pages=12, stores=[Broken(LAYOUT, 64)]) as engine:
        assert await together(engine) == alone
        assert next(iter(engine.cache.tiers)).stats.failures > 0


async def test_no_streamed_token_is_repeated(alone: list[list[int]]):
    """Each token comes once, even across a swap."""
    async with running(pages=12, stores=[HostStore(LAYOUT, 64)]) as engine:
        streams = [
            await engine.start_generate(start(prompt, f"r{n}", **MANY))
            for n, prompt in enumerate(PROMPTS)
        ]
        events = await asyncio.gather(*(collect(stream) for stream in streams))
        assert [[t for event in each for t in event.token_ids] for each in events] == alone
        assert all(each[-1].usage.completion_tokens == 60 for each in events)  # type: ignore[union-attr]
        assert engine.preemptions > 2


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
async def test_cancellation_at_any_moment_leaves_nothing(seed: int, tmp_path: Path):
    """`running` verifies at the end that all pages and slots are free or cached."""
    random_ = random.Random(seed)
    stores: list[TierStore] = [HostStore(LAYOUT, 12), DiskStore(LAYOUT, 40, tmp_path)]
    async with running(pages=12, stores=stores) as engine:

        async def one(number: int) -> None:
            await asyncio.sleep(random_.random() * 0.1)
            prompt = PROMPTS[number % 6]
            tokens = random_.randrange(1, 60) if number % 3 else 60
            try:  # some disconnect after a delay, others after a number of tokens
                async with asyncio.timeout(random_.random() * 2 if number % 3 != 1 else None):
                    stream = await engine.start_generate(start(prompt, f"r{number}", **MANY))
                    try:
                        async for event in stream.events():
                            tokens -= len(event.token_ids)
                            if tokens <= 0:
                                break
                    finally:
                        stream.close()
            except TimeoutError:
                engine.release(Release(request_id=f"r{number}"))

        await asyncio.gather(*(one(number) for number in range(24)))
        await at_rest(engine)
        engine.cache.check_integrity()
        assert engine.preemptions > 0


# The scheduler, step by step


PAGE = 16


class Steps:
    """A scheduler over a cache with a gated tier; steps compute nothing."""

    def __init__(self, pages: int = 8, slots: int = 32) -> None:
        self.store = GatedStore(LAYOUT, slots)
        self.gate = self.store.gate
        self.cache: KVCache = make_cache(pages=pages, stores=[self.store])
        self.scheduler = Scheduler(self.cache, token_budget=64, max_batch=16)
        self.woken = threading.Event()
        self.scheduler.wake = self.woken.set

    def step(self) -> set[str]:
        plan = self.scheduler.plan()
        if plan:
            self.cache.begin_forward(
                [chunk.seq_id for _, chunk in plan], [len(chunk.tokens) for _, chunk in plan]
            )
            self.cache.end_forward()
        for job, chunk in plan:
            if chunk.sample:
                job.tokens.append(100 + len(job.tokens))
        return {job.request_id for job, _ in plan}

    def until(self, true: Callable[[], bool]) -> None:
        give_up = monotonic() + 20
        while not true():
            assert monotonic() < give_up
            if not self.step():
                self.woken.wait(0.01)
                self.woken.clear()

    def add(self, number: int, tokens: int) -> Generation:
        job = generation(number, range(1000 * number, 1000 * number + tokens))
        self.scheduler.add(job)
        return job

    def end(self, *jobs: Generation) -> None:
        self.gate.open()
        for job in jobs:
            self.scheduler.remove(job)
            if job.started:
                self.cache.remove_sequence(job.seq_id)
        assert self.step() == set()
        give_up = monotonic() + 20
        while not all(tier.idle for tier in self.cache.tiers):
            assert monotonic() < give_up
        self.cache.check_integrity()
        use = self.cache.page_use()
        assert use.free + use.cached == use.total
        assert self.cache.tier_use()[0].swapped == 0
        self.cache.close()


@pytest.fixture
def steps() -> Steps:
    return Steps()


def test_a_swap_out_ends_before_the_next_preemption(steps: Steps):
    old, middle, young = (steps.add(number, 30) for number in (1, 2, 3))
    steps.gate.shut()
    while not steps.scheduler.preemptions:
        steps.step()
    steps.gate.one()
    for _ in range(40):  # the jobs run until their pages are full, then wait
        steps.step()
    assert steps.scheduler.preemptions == 1
    assert steps.scheduler.running == [old, middle]
    assert list(steps.scheduler.waiting) == [young]
    assert not steps.woken.is_set()
    steps.cache.check_integrity()
    before = len(old.tokens)
    steps.gate.open()
    assert steps.woken.wait(20)
    steps.step()
    assert len(old.tokens) == before + 1
    steps.end(old, middle, young)


def test_a_swapped_job_resumes_where_it_was(steps: Steps):
    old, young = steps.add(1, 40), steps.add(2, 40)
    while not steps.scheduler.preemptions:
        steps.step()
    tokens, begin = list(young.tokens), young.begin
    steps.until(lambda: len(old.tokens) == 100)
    assert young.tokens == tokens and not young.started
    steps.scheduler.remove(old)
    steps.cache.remove_sequence(old.seq_id)
    steps.until(lambda: len(young.tokens) > len(tokens))
    assert young.begin == begin
    assert young.tokens == [*tokens, 100 + len(tokens)]
    assert next(iter(steps.cache.tiers)).stats.swaps_in == 1
    steps.end(young)


@pytest.mark.parametrize("when", ["leaving", "out", "returning"])
def test_an_aborted_job_leaves_nothing(steps: Steps, when: str):
    old, young = steps.add(1, 40), steps.add(2, 40)
    if when == "leaving":
        steps.gate.shut()
    while not steps.scheduler.preemptions:
        steps.step()
    if when == "leaving":
        steps.gate.one()
    else:
        assert steps.woken.wait(20)
        if when == "returning":
            steps.scheduler.remove(old)
            steps.cache.remove_sequence(old.seq_id)
            old.started = False
            steps.gate.shut()
            assert steps.step() == set()
            steps.gate.one()
    steps.scheduler.remove(young)
    steps.scheduler.remove(young)
    steps.cache.check_integrity()
    assert not steps.scheduler.waiting
    steps.end(old, young)


def test_the_oldest_job_goes_first_while_another_returns(steps: Steps):
    """A returning job takes the last pages; an older job waits for its return and preempts it."""
    old, middle, young = (steps.add(number, 30) for number in (1, 2, 3))
    while not steps.scheduler.preemptions:
        steps.step()
    assert steps.woken.wait(20)
    steps.scheduler.remove(middle)
    steps.cache.remove_sequence(middle.seq_id)
    middle.started = False
    steps.gate.shut()
    while steps.step():  # until its remaining pages are full
        pass
    steps.gate.one()
    assert steps.scheduler.running == [old]
    assert steps.scheduler.preemptions == 1
    steps.cache.check_integrity()
    before = len(old.tokens)
    steps.gate.open()
    steps.until(lambda: len(old.tokens) > before)
    assert steps.scheduler.preemptions == 2
    steps.end(old, middle, young)


def test_many_jobs_in_a_small_pool_all_progress(steps: Steps):
    jobs = [steps.add(number, 30) for number in range(1, 7)]
    left = list(jobs)

    def all_done() -> bool:
        for job in list(left):
            if job in steps.scheduler.running and len(job.tokens) >= 80:
                steps.scheduler.remove(job)
                steps.cache.remove_sequence(job.seq_id)
                job.started = False
                left.remove(job)
        return not left

    steps.until(all_done)
    for job in jobs:
        start_ = job.prompt_len
        assert job.tokens[start_:] == [100 + n for n in range(start_, len(job.tokens))]
    assert next(iter(steps.cache.tiers)).stats.swaps_in > 0
    steps.end(*jobs)


# Promotion of prefixes


def evict_all(cache: KVCache) -> None:
    seq_id = SeqId(10**9)
    cache.add_sequence(seq_id)
    cache.grow(seq_id, cache.page_use().total * PAGE)
    cache.remove_sequence(seq_id)


@pytest.mark.parametrize("where", ["host", "disk", "both"])
async def test_a_prompt_is_promoted_from_a_tier(where: str, tmp_path: Path):
    stores: list[TierStore] = []
    if where != "disk":
        stores.append(HostStore(LAYOUT, 64 if where == "host" else 10))
    if where != "host":
        stores.append(DiskStore(LAYOUT, 64, tmp_path))
    async with running(pages=16, stores=stores) as engine:
        first = await generate(engine, LONG, "a")
        for number, prompt in enumerate(OTHERS):
            await generate(engine, prompt, f"o{number}")
            await at_rest(engine)
        evict_all(engine.cache)
        stream = await engine.start_generate(start(LONG, "b"))
        events = await collect(stream)
        assert [token for event in events for token in event.token_ids] == first
        assert events[0].begin == 96
        assert events[-1].usage is not None and events[-1].usage.cached_tokens == 96
        hits = {tier.name: tier.stats.promoted_tokens for tier in engine.cache.tiers}
        assert (
            hits
            == {"host": {"host": 96}, "disk": {"disk": 96}, "both": {"host": 0, "disk": 96}}[where]
        )


async def test_sends_and_leases_promote_from_tiers():
    network = MemoryNetwork()
    host = {"pages": 16, "stores": [HostStore(LAYOUT, 64)]}
    async with (
        running(network, name="p", **host) as prefill,  # type: ignore[arg-type]
        running(network, name="d", pages=16, stores=[HostStore(LAYOUT, 64)]) as decode,
    ):
        expected = await generate(prefill, LONG, "a")
        await at_rest(prefill)
        evict_all(prefill.cache)
        got = decode.prep_recv(prep(LONG, 99))
        reply = await prefill.remote_send(sending(LONG, 0, 99, got.kv_addr))
        assert (reply.cached_tokens, reply.computed_tokens) == (96, 3)
        tokens = await generate(decode, LONG, "r", begin=99, lease_id=got.lease_id)
        assert tokens == expected
        await at_rest(decode)
        evict_all(decode.cache)
        await decode.promote(LONG)
        got = decode.prep_recv(prep(LONG, 99, "s"))
        assert got.match_len == 96
        decode.release(Release(request_id="s"))


async def test_a_disconnect_during_a_promotion_leaves_nothing():
    store = GatedStore(LAYOUT, 64)
    async with running(pages=16, stores=[store]) as engine:
        await generate(engine, LONG, "a")
        await at_rest(engine)
        evict_all(engine.cache)
        store.gate.shut()
        call = asyncio.create_task(engine.start_generate(start(LONG, "b")))
        await asyncio.to_thread(store.gate.one)
        assert engine.waiting == 1
        with pytest.raises(DuplicateRequest):
            await engine.start_generate(start(LONG, "b"))
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        released = asyncio.create_task(engine.start_generate(start(LONG, "c")))
        await asyncio.sleep(0.01)
        engine.release(Release(request_id="c"))
        store.gate.open()
        with pytest.raises(DuplicateRequest, match="released"):
            await released
        assert (engine.running, engine.waiting) == (0, 0)
        await at_rest(engine)
        assert engine.cache.prefix_tokens >= 96  # the copy completes nevertheless


async def test_waits_for_a_promotion_are_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("engine.service.promotion.TIMEOUT_S", 0.05)
    store = GatedStore(LAYOUT, 64)
    async with running(pages=32, stores=[store]) as engine:
        first = await generate(engine, LONG, "a")
        await at_rest(engine)
        evict_all(engine.cache)
        store.gate.shut()
        assert await generate(engine, LONG, "b") == first
        assert next(iter(engine.cache.tiers)).stats.promoted_tokens == 0
        store.gate.open()


# Real processes


@pytest.mark.processes
@pytest.mark.slow
def test_a_real_engine_answers_from_its_tiers(tmp_path: Path):
    engine = EngineProcess(
        *("--pool-pages", "16", "--host-pages", "10"),
        *("--disk-pages", "100", "--disk-dir", str(tmp_path)),
    )
    try:
        first = engine.generate(LONG)
        for prompt in OTHERS:
            engine.generate(prompt)
        engine.at_rest()
        again = engine.generate(LONG)
        assert [event["token_ids"] for event in again] == [event["token_ids"] for event in first]
        assert again[-1]["usage"]["cached_tokens"] == 96
        engine.at_rest()
        prompt = OTHERS[0]
        reply = engine.post("prep_recv", request_id="p", prompt=prompt, end=len(prompt)).json()
        assert reply["match_len"] == 80
        engine.post("release", request_id="p")
        for tier in engine.at_rest()["tiers"]:
            assert tier["free"] + tier["cached"] == tier["total"]
        metrics = engine.http.get("/metrics").text
        assert 'microserve:tier_promoted_tokens{model_name="tiny",tier="disk"} ' in metrics
        assert list(tmp_path.iterdir()) == []
        assert engine.stop()[0] == 0
    finally:
        engine.kill()


@pytest.mark.processes
@pytest.mark.slow
def test_an_idle_engine_with_tiers_uses_no_cpu(tmp_path: Path):
    engine = EngineProcess(
        *("--pool-pages", "16", "--host-pages", "10"),
        *("--disk-pages", "10", "--disk-dir", str(tmp_path)),
    )
    try:
        engine.generate(LONG)
        engine.at_rest()
        process = psutil.Process(engine.pid)
        before = sum(process.cpu_times()[:2])
        threading.Event().wait(2.0)
        assert sum(process.cpu_times()[:2]) - before < 0.1
    finally:
        engine.kill()


@pytest.mark.processes
@pytest.mark.slow
def test_unused_host_pages_take_no_memory():
    engine = EngineProcess("--pool-pages", "16", "--host-pages", str(1 << 18))
    try:
        engine.generate(LONG)
        room = (1 << 18) * LAYOUT.page_bytes
        assert psutil.Process(engine.pid).memory_info().rss < room / 2
    finally:
        engine.kill()
