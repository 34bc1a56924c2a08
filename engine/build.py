"""The composition root: builds an engine from its configuration."""

from __future__ import annotations

import hashlib
import logging
import os
import ssl
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from urllib.parse import quote

import torch

from engine.execution.forward.model_runner import ModelRunner
from engine.execution.runner import Runner
from engine.execution.step_loop import StepLoop
from engine.execution.stepper import Stepper
from engine.kernels.cpu_features import multiplies_bf16
from engine.latency import FixedLatency
from engine.mock.runner import MockRunner, mock_sample
from engine.models import LoadedModel, load_model, split_model
from engine.protocol import BadRequest
from engine.protocol.config import EngineConfig
from engine.sampling.sampler import sample
from engine.scheduling import Chunk
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.step_limits import StepLimits
from engine.service.borrowing import Borrowing
from engine.service.engine import MicroserveEngine
from engine.service.metrics import EngineMetrics
from engine.service.mirror_tasks import MirrorTasks
from engine.service.readings import engine_readings
from engine.sizing import Memory, PoolSize, choose_device_pool, choose_pool, read_memory
from engine.web import client_context
from engine.workers import WorkerGroup, WorkerSettings, WorkersRunner, WorkerStore
from kvcache.cache import KVCache
from kvcache.lease import Identity
from kvcache.memory import KVLayout
from kvcache.page_store import PageStore, TorchPageStore
from kvcache.remote_attention import (
    AttentionShape,
    Creditor,
    Limits,
    PagesOfLoans,
    RemoteAttention,
)
from kvcache.tiers import DiskStore, HostStore, TierStore
from kvcache.transport import Network, ShmTransport, make_transport
from kvcache.types import EngineId

__all__ = ["build_engine"]

log = logging.getLogger(__name__)

MOCK_PAGES = 1 << 16
LOGITS_STEP = 64  # rows


def build_engine(config: EngineConfig, secret: bytes, epoch: int) -> MicroserveEngine:
    """Load the model and allocate the pool. Call it on the event loop that will serve.

    Does not start the step loop. Raises `ModelError`, `BadRequest` for a bad page size, a missing
    transport, a context longer than the model's, or a pool or tiers larger than the memory, and
    `OSError` if the transport cannot listen.
    """
    device = _device(config)
    dtype = _dtype(config)
    split = config.has_workers
    threads = 1 if split else config.threads or len(os.sched_getaffinity(0))
    # A thread that computes in parallel keeps its OpenMP team until it ends. With a second team
    # there are more threads than cores, and OpenMP puts threads to sleep after each product. So
    # everything that computes here does so on a thread that ends before the step loop starts. Its
    # number of threads is that of the steps; this thread has the default.
    with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(threads,)) as computing:
        model = computing.submit(
            load_model,
            config.model,
            dtype=dtype,
            device=device,
            quantization=config.quantization,
            weights=not split,
        ).result()
        group = _start_workers(model, config, dtype) if split else None
        try:
            context, memory = _context(model, config), read_memory()
            pool_memory = memory if device.type == "cpu" else _gpu_memory(device)
            if config.device_pages:
                _check_memory(
                    memory, "device_pages", config.device_pages, _page(model, config, dtype)
                )
            layout = _layout(model, config, dtype, context, pool_memory)
            if config.borrow and not config.max_model_len:
                context = min(context, (layout.pages - 1) * layout.page_size)
            if config.device_pages >= layout.pages:
                raise BadRequest(
                    f"--device-pages {config.device_pages}: the pool has {layout.pages - 1} pages; "
                    "workers compute in the pool without this flag",
                    param="device_pages",
                )
            fingerprint = layout.fingerprint(_kv_digest(model, device))
            transport = make_transport(
                config.transport, epoch, secret=secret, network=_network(config), device=device
            )
            store: PageStore
            if group is not None:
                store = WorkerStore(group, transport, layout)
            else:
                store = computing.submit(
                    TorchPageStore.on, transport, layout, query_heads=model.config.num_heads
                ).result()
        except BaseException:
            if group is not None:
                group.close()
            raise
        cache = KVCache(
            store,
            transport,
            identity=Identity(
                EngineId(config.engine_id),
                epoch,
                secret,
                fingerprint,
                config.url,
            ),
            tier_stores=_stores(config, layout, fingerprint, memory),
            lend_pages=int(config.lend_share * (layout.pages - 1) + 1e-6),
            loan_s=config.lease_ms / 1000,
        )
        scheduler: Scheduler | None = None  # until debtors can know of this engine
        creditor = borrowing = None
        if isinstance(store, TorchPageStore):
            creditor = computing.submit(
                _creditor,
                store,
                cache,
                model.config.num_heads,
                config,
                lambda: scheduler is not None and bool(scheduler.running or scheduler.sends),
            ).result()
            borrowing = _borrowing(cache, model.config.num_heads, config)
        runner: Runner[torch.Tensor] | None = None
        start: Callable[[Sequence[Chunk]], object] | None = None
        if isinstance(store, WorkerStore):
            runner = workers = WorkersRunner(store, cache, depth=config.pp)
            start = workers.start
        elif model.transformer is not None:
            runner = computing.submit(
                ModelRunner,
                model,
                cache,
                graph_rows=config.max_batch,
                context=context,
                prompt_rows=config.token_budget,
            ).result()
    limits = None
    if split:
        limits = StepLimits(cache, samples=config.max_batch, pages=config.device_pages // 2)
    scheduler = Scheduler(
        cache,
        token_budget=config.token_budget,
        max_batch=config.max_batch,
        swap=config.preemption == "swap",
        decode_slowdown=config.decode_slowdown,
        depth=config.pp,
        limits=limits,
    )
    metrics = EngineMetrics(config.model)
    engine = MicroserveEngine(
        model,
        cache,
        scheduler,
        metrics,
        max_live=config.max_batch + config.max_waiting,
        lease_ms=config.lease_ms,
        context=context,
        mirrors=MirrorTasks(cache, metrics, config.api_key, _peer_tls(config)),
        workers=list if group is None else group.states,
        creditor=creditor,
        borrowing=borrowing,
    )
    if runner is not None:
        stepper = Stepper(
            cache, scheduler, runner, sample, engine.deliver, time.monotonic, start=start
        )
    else:
        pace = FixedLatency(config.step_ms, config.prefill_tokens_per_ms)
        mock_runner = MockRunner(cache, pace)
        stepper = Stepper(
            cache, scheduler, mock_runner, mock_sample, engine.deliver, time.monotonic
        )
    # What has lost its GPU has to be started anew. The connections break, as after any death.
    died = engine.died if device.type == "cpu" else partial(os._exit, 1)
    engine.loop = StepLoop(stepper, died, compute_threads=threads)
    if isinstance(runner, ModelRunner | WorkersRunner):
        engine.loop.timings.row_multiple = runner.row_multiple
    metrics.register(engine_readings(engine))
    return engine


def _device(config: EngineConfig) -> torch.device:
    """Return the device of `--device`: the first GPU that this process sees, or the CPU.

    Raises `BadRequest` without a GPU, and for flags that need pools in host memory.
    """
    if config.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise BadRequest("--device cuda: torch finds no GPU", param="device")
    only_on_cpus = {
        "model": config.model == "mock",
        "tp": config.tp > 1,
        "pp": config.pp > 1,
        "device_pages": config.device_pages > 0,
        "lend_share": config.lend_share > 0,
        "borrow": config.borrow,
    }
    for name, is_used in only_on_cpus.items():
        if is_used:
            flag = f"--{name.replace('_', '-')}" if name != "model" else "the model mock"
            raise BadRequest(f"{flag} needs --device cpu", param=name)
    return torch.device("cuda", torch.cuda.current_device())


def _gpu_memory(device: torch.device) -> Memory:
    """Return the memory of a GPU, of which the weights have taken theirs."""
    free, total = torch.cuda.mem_get_info(device)
    return Memory(total, free, torch.cuda.get_device_name(device))


def _network(config: EngineConfig) -> Network:
    """Return how other hosts reach this engine."""
    return Network(config.kv_address, config.kv_port_range, config.kv_interface, config.verify_puts)


def _creditor(
    store: TorchPageStore,
    cache: KVCache,
    query_heads: int,
    config: EngineConfig,
    busy: Callable[[], bool],
) -> Creditor | None:
    """Return what answers queries over lent pages; None if this engine lends none.

    Without a way for KV between hosts, debtors are on this host. Raises `Unsupported` for a dtype
    in which no queries are shipped, and `OSError` if it cannot listen.
    """
    if not cache.bookkeeping.lender.most:
        return None
    return Creditor(
        store.pool,
        store.layout,
        query_heads=query_heads,
        identity=cache.identity,
        bad_loans=PagesOfLoans(cache.bookkeeping.lender, cache.lock),
        share=config.lend_compute,
        busy=busy,
        network=_network(config) if not isinstance(cache.transport, ShmTransport) else None,
    )


def _borrowing(cache: KVCache, query_heads: int, config: EngineConfig) -> Borrowing | None:
    """Return the source of borrowed blocks, connected to the cache; None without `--borrow`.

    Raises `Unsupported` for a dtype in which no queries are shipped.
    """
    if not config.borrow:
        return None
    remote = RemoteAttention(cache.identity, AttentionShape.of(cache.layout, query_heads))
    borrowing = Borrowing(
        cache.identity,
        remote,
        page_size=cache.page_size,
        api_key=config.api_key,
        tls=_peer_tls(config),
    )
    cache.borrow(borrowing, remote)
    return borrowing


def _start_workers(model: LoadedModel, config: EngineConfig, dtype: torch.dtype) -> WorkerGroup:
    """Start the workers of an engine that is split. Raises `BadRequest` if one does not come up."""
    decodes = config.role != "prefill"
    parts = split_model(model.config, tp=config.tp, pp=config.pp, decodes=decodes)
    group = WorkerGroup(
        WorkerSettings(
            model=config.model,
            dtype=str(dtype).removeprefix("torch."),
            device=config.device,
            quantization=config.quantization,
            tp=config.tp,
            pp=config.pp,
            decodes=decodes,
            threads=config.threads,
            cpus=tuple(sorted(os.sched_getaffinity(0))),
            page_size=config.page_size,
            device_pages=config.device_pages,
            hidden=model.config.hidden_size,
            logits_rows=config.pp * (config.max_batch // LOGITS_STEP + 1) * LOGITS_STEP,
        ),
        [part.shard for part in parts],
        vocab=model.config.vocab_size,
        digest=model.weights_digest,
    )
    # The connections break, so routers go on elsewhere at once, as after any death.
    group.on_loss = lambda _reason: os._exit(1)
    sizes = ", ".join(f"{size >> 20}" for size in group.weight_bytes)
    log.info("%d workers have %s MiB of weights", config.tp * config.pp, sizes)
    return group


def _dtype(config: EngineConfig) -> torch.dtype:
    """Return the dtype of weights and KV; the synthetic models stay bit-reproducible."""
    if config.dtype != "auto":
        dtype: torch.dtype = getattr(torch, config.dtype)
        return dtype
    exact = config.model in ("tiny", "mock") or (config.device == "cpu" and not multiplies_bf16())
    return torch.float32 if exact else torch.bfloat16


def _peer_tls(config: EngineConfig) -> ssl.SSLContext | None:
    """Return the TLS context that verifies peers, or None if this engine and they speak HTTP."""
    if not config.url.startswith("https:"):
        return None
    return client_context(config.router_ca, config.tls_cert, config.tls_key)


def _stores(
    config: EngineConfig, layout: KVLayout, fingerprint: str, memory: Memory
) -> list[TierStore]:
    """Return the stores of the tiers below the pool, fastest first."""
    stores: list[TierStore] = []
    pinned = config.device == "cuda"
    if config.host_pages:
        _check_memory(memory, "host_pages", config.host_pages, layout)
        stores.append(HostStore(layout, config.host_pages, pinned=pinned))
    if config.disk_pages:
        stores.append(
            DiskStore(
                layout,
                config.disk_pages,
                Path(config.disk_dir),
                pinned=pinned,
                keep=f"{quote(config.engine_id, safe='')}.kv" if config.disk_keep else "",
                fingerprint=fingerprint,
            )
        )
    return stores


def _check_memory(memory: Memory, flag: str, pages: int, layout: KVLayout) -> None:
    """Raise `BadRequest` if `pages`, chosen by `flag`, are more than the memory."""
    wanted = pages * layout.page_bytes
    if wanted > memory.limit:
        raise BadRequest(
            f"--{flag.replace('_', '-')} {pages} needs {wanted >> 20} MiB; "
            f"{memory.source} has {memory.limit >> 20} MiB",
            param=flag,
        )


def _context(model: LoadedModel, config: EngineConfig) -> int:
    """Return the longest context to serve, in tokens, if pool and borrowed pages hold it."""
    longest = model.config.context_length
    if config.max_model_len > longest:
        raise BadRequest(
            f"--max-model-len {config.max_model_len}: the context of {config.model} is {longest} "
            "tokens",
            param="max_model_len",
        )
    if config.borrow and config.max_model_len > (most := Limits().context):
        raise BadRequest(
            f"--max-model-len {config.max_model_len}: with --borrow it is {most} tokens at most, "
            "the longest context that other engines compute for this one",
            param="max_model_len",
        )
    context = config.max_model_len or longest
    if config.device_pages:  # all pages of a sequence are in one half
        fitting = config.device_pages // 2 * config.page_size
        if config.max_model_len > fitting:
            raise BadRequest(
                f"--max-model-len {config.max_model_len}: half of --device-pages "
                f"{config.device_pages} has room for {fitting} tokens",
                param="max_model_len",
            )
        context = min(context, fitting)
    return context


def _layout(
    model: LoadedModel, config: EngineConfig, dtype: torch.dtype, context: int, memory: Memory
) -> KVLayout:
    """Return the pool's shape, with the configured number of pages or one that suits the memory.

    Logs the number of pages and its reason.
    """
    one = _page(model, config, dtype)
    if config.pool_pages:
        _check_memory(memory, "pool_pages", config.pool_pages, one)
        size = PoolSize(config.pool_pages, "--pool-pages")
    elif config.model == "mock":
        size = PoolSize(MOCK_PAGES, "the mock's pages are tiny")
    else:
        choose = choose_pool if config.device == "cpu" else choose_device_pool
        size = choose(
            page_bytes=one.page_bytes,
            context_pages=one.pages_for(context),
            sequences=config.max_batch,
            memory=memory,
            share=config.memory_share,
        )
    tokens = size.pages * config.page_size
    said = (
        f"KV pool: {size.pages} pages, {size.pages * one.page_bytes >> 20} MiB, {tokens} tokens "
        f"({size.reason})"
    )
    if tokens < context and config.borrow and config.max_model_len:
        log.info("%s; contexts of up to %d tokens, with borrowed pages", said, context)
    elif tokens < context:
        log.log(
            logging.INFO if config.pool_pages and not config.borrow else logging.WARNING,
            "%s; contexts are limited to %d of %d tokens%s",
            said,
            tokens,
            context,
            ": --borrow without --max-model-len serves no longer ones" if config.borrow else "",
        )
    else:
        log.info("%s; contexts of up to %d tokens", said, context)
    return replace(one, pages=size.pages + 1)  # plus the scratch page


def _page(model: LoadedModel, config: EngineConfig, dtype: torch.dtype) -> KVLayout:
    """Return the shape of a page of all layers."""
    of = model.config
    return KVLayout(of.num_layers, 1, config.page_size, of.num_kv_heads, of.head_dim, dtype)


def _kv_digest(model: LoadedModel, device: torch.device) -> str:
    """Digest what KV depends on besides the layout: the weights, and RoPE with the config.

    Also whether the pool is on a GPU: no transport leads from there to host memory.
    """
    source = f"{model.weights_digest}|{model.config}"
    if device.type != "cpu":
        source += f"|{device.type}"
    if model.quantization != "none":
        source += f"|{model.quantization}"
    return hashlib.blake2b(source.encode(), digest_size=16).hexdigest()
