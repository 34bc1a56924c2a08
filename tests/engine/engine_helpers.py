"""Helpers for tests of the engine: engines in this process, over the memory transport."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Sequence
from functools import cache
from typing import Any

import torch
import uvicorn

from engine.api.app import build_app
from engine.execution.forward.model_runner import ModelRunner
from engine.execution.step_loop import StepLoop
from engine.execution.stepper import Stepper
from engine.models import LoadedModel, load_model
from engine.protocol import EngineConfig, Event, PrepRecv, RemoteSend, Sampling, StartGenerate
from engine.sampling.sampler import sample
from engine.scheduling.jobs import Generation
from engine.scheduling.scheduler import Scheduler
from engine.service.engine import MicroserveEngine
from engine.service.generation_stream import GenerationStream
from engine.service.metrics import EngineMetrics
from engine.service.mirror_tasks import MirrorTasks
from engine.service.readings import engine_readings
from kvcache.cache import KVCache
from kvcache.lease.identity import Identity
from kvcache.memory.layout import KVLayout
from kvcache.page_store.torch_store import TorchPageStore
from kvcache.tiers.store import TierStore
from kvcache.transport import MemoryNetwork, MemoryTransport
from kvcache.types import EngineId, SeqId

VOCAB = 512


@cache
def tiny() -> LoadedModel:
    return load_model("tiny", dtype=torch.float32, device=torch.device("cpu"))


def tiny_layout(pages: int) -> KVLayout:
    """Return the layout of `tiny` with `pages` pages and the scratch page."""
    shape = tiny().config
    return KVLayout(
        shape.num_layers, pages + 1, 16, shape.num_kv_heads, shape.head_dim, torch.float32
    )


def make_cache(
    network: MemoryNetwork | None = None,
    pages: int = 64,
    name: str = "a",
    url: str = "",
    stores: Sequence[TierStore] = (),
    lend_pages: int = 0,
    loan_s: float = 30.0,
) -> KVCache:
    """Return a cache for `tiny` with `pages` pages and the scratch page."""
    shape, layout = tiny().config, tiny_layout(pages)
    transport = MemoryTransport(network or MemoryNetwork(), 1)
    return KVCache(
        TorchPageStore.on(transport, layout, query_heads=shape.num_heads),
        transport,
        identity=Identity(EngineId(name), 1, b"secret", "tiny", url),
        tier_stores=stores,
        lend_pages=lend_pages,
        loan_s=loan_s,
    )


def generation(
    number: int,
    tokens: Sequence[int],
    *,
    output: Sequence[int] = (),
    priority: int = 0,
    **sampling: Any,
) -> Generation:
    """Return a generation with prompt `tokens` and earlier `output`; greedy by default."""
    return Generation(
        request_id=f"r{number}",
        seq_id=SeqId(number),
        tokens=[*tokens, *output],
        prompt_len=len(tokens),
        sampling=Sampling(**{"temperature": 0.0, **sampling}),
        stop_ids=frozenset(sampling.get("stop_token_ids", ())),
        priority=priority,
    )


@contextlib.asynccontextmanager
async def running(
    network: MemoryNetwork | None = None,
    *,
    pages: int = 64,
    token_budget: int = 128,
    max_batch: int = 16,
    max_live: int = 32,
    name: str = "a",
    url: str = "",
    api_key: str = "",
    lease_ms: int = 30_000,
    stores: Sequence[TierStore] = (),
    swap: bool = True,
    context: int | None = None,
    lend_pages: int = 0,
    loan_s: float = 30.0,
) -> AsyncIterator[MicroserveEngine]:
    """Run one engine; at the end it must come to rest without a leaked page."""
    cache = make_cache(network, pages, name, url, stores, lend_pages, loan_s)
    scheduler = Scheduler(cache, token_budget=token_budget, max_batch=max_batch, swap=swap)
    metrics = EngineMetrics("tiny")
    engine = MicroserveEngine(
        tiny(),
        cache,
        scheduler,
        metrics,
        max_live=max_live,
        lease_ms=lease_ms,
        context=context,
        mirrors=MirrorTasks(cache, metrics, api_key),
    )
    runner = ModelRunner(tiny(), cache)
    stepper = Stepper(cache, scheduler, runner, sample, engine.deliver, time.monotonic)
    engine.loop = StepLoop(stepper, engine.died, compute_threads=1)
    engine.metrics.register(engine_readings(engine))
    engine.loop.start()
    try:
        yield engine
        if engine.loop.alive:
            await at_rest(engine)
        cache.check_integrity()
    finally:
        await engine.mirrors.close()
        engine.loop.stop()
        cache.close()


@contextlib.asynccontextmanager
async def serving(
    network: MemoryNetwork, *, api_key: str = "", **options: Any
) -> AsyncIterator[MicroserveEngine]:
    """Run one engine that also serves HTTP, where peers request more room for mirrors."""

    class Server(uvicorn.Server):
        capture_signals = contextlib.nullcontext  # pytest handles signals

    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with running(network, url=url, api_key=api_key, **options) as engine:
            app = build_app(engine, EngineConfig(model="tiny", api_key=api_key), 1)
            server = Server(uvicorn.Config(app, log_config=None, lifespan="off"))
            task = asyncio.create_task(server.serve(sockets=[listener]))
            try:
                yield engine
            finally:
                server.should_exit = True
                await task


async def at_rest(engine: MicroserveEngine) -> None:
    """Wait until nothing runs and every page, of the pool and of tiers, is free or cached."""
    async with asyncio.timeout(30):
        while True:
            uses = [engine.cache.page_use(), *engine.cache.tier_use()]
            busy = engine.running + engine.waiting + engine.puts_in_flight
            if not busy and all(use.free + use.cached == use.total for use in uses):
                return
            await asyncio.sleep(0.002)


def prep(prompt: Sequence[int], end: int, request_id: str = "r", **fields: Any) -> PrepRecv:
    return PrepRecv(request_id=request_id, prompt=list(prompt), end=end, **fields)


def sending(
    prompt: Sequence[int],
    begin: int,
    end: int,
    kv_addr: str,
    request_id: str = "r",
    *,
    priority: int = 0,
) -> RemoteSend:
    return RemoteSend(
        request_id=request_id,
        prompt=list(prompt),
        begin=begin,
        end=end,
        kv_addr=kv_addr,
        priority=priority,
    )


def start(prompt: Sequence[int], request_id: str = "r", **fields: Any) -> StartGenerate:
    options = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, **fields}
    return StartGenerate(request_id=request_id, prompt=list(prompt), **options)


async def collect(stream: GenerationStream) -> list[Event]:
    async with asyncio.timeout(30):
        return [event async for event in stream.events()]


async def generate(
    engine: MicroserveEngine, prompt: Sequence[int], request_id: str = "r", **fields: Any
) -> list[int]:
    """Return the tokens of one generation."""
    stream = await engine.start_generate(start(prompt, request_id, **fields))
    return [token for event in await collect(stream) for token in event.token_ids]


@contextlib.asynccontextmanager
async def running_pair(**settings: Any) -> AsyncIterator[tuple[MicroserveEngine, MicroserveEngine]]:
    """Two engines in one network, `p` and `d`; `settings` are those of `running`."""
    network = MemoryNetwork()
    async with (
        running(network, name="p", **settings) as prefill,
        running(network, name="d", **settings) as decode,
    ):
        yield prefill, decode
