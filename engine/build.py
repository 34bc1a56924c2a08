"""Puts an engine together from its configuration."""

from __future__ import annotations

import hashlib
import os
import ssl
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import quote

import torch

from engine.api.metrics import EngineMetrics
from engine.execution.model_runner import ModelRunner
from engine.execution.step_loop import Draw, StepLoop
from engine.kernels.cpu_features import multiplies_bf16
from engine.mock.runner import MockRunner, mock_sample
from engine.models import LoadedModel, load_model
from engine.protocol import BadRequest
from engine.protocol.config import EngineConfig
from engine.sampling.sampler import sample
from engine.scheduling.scheduler import Scheduler
from engine.service.engine import MicroserveEngine
from engine.service.mirrors import Mirrors
from kvcache.cache import KVCache
from kvcache.lease.identity import Identity
from kvcache.memory.layout import KVLayout
from kvcache.tiers.disk_store import DiskStore
from kvcache.tiers.store import HostStore, Store
from kvcache.transport import make_transport
from kvcache.types import EngineId

__all__ = ["build_engine"]

POOL_SHARE = 0.05  # of the machine's memory, where --pool-pages does not say
POOL_MOST = 4 << 30  # bytes
MOCK_PAGES = 1 << 16
CONTEXTS = 2  # the pool holds at least so many sequences of full length


def build_engine(config: EngineConfig, secret: bytes, epoch: int) -> MicroserveEngine:
    """Load the model and allocate the pool. Call it on the event loop that will serve.

    The step loop is not started. Raises `ModelError`, `BadRequest` for a bad page size, a transport
    that is not installed or tiers that there is no room for, and `OSError` if it cannot listen.
    """
    device = torch.device(config.device)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise BadRequest("--device cuda: this machine's torch finds no GPU", param="device")
        # See docs/gpu.md.
        message = "--device cuda: there is no transport yet for pools in a GPU's memory"
        raise BadRequest(message, param="device")
    dtype = _dtype(config)
    threads = config.threads or len(os.sched_getaffinity(0))
    # Whoever computes on several threads keeps a team of them for as long as it lives. Two teams
    # are more than there are cores, and OpenMP then puts threads to sleep after each product.
    with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(threads,)) as loader:
        model = loader.submit(
            load_model, config.model, dtype=dtype, device=device, quantization=config.quantization
        ).result()
    layout = _layout(model, config, dtype)
    fingerprint = layout.fingerprint(_kv_digest(model))
    cache = KVCache(
        layout,
        make_transport(config.transport, layout, epoch, secret=secret, host=config.host),
        query_heads=model.config.num_heads,
        identity=Identity(
            EngineId(config.engine_id),
            epoch,
            secret,
            fingerprint,
            config.url,
        ),
        stores=_stores(config, layout, fingerprint),
    )
    scheduler = Scheduler(
        cache,
        token_budget=config.token_budget,
        max_batch=config.max_batch,
        swap=config.preemption == "swap",
        decode_slowdown=config.decode_slowdown,
    )
    metrics = EngineMetrics(config.model)
    engine = MicroserveEngine(
        model,
        cache,
        scheduler,
        metrics,
        max_live=config.max_batch + config.max_waiting,
        lease_ms=config.lease_ms,
        mirrors=Mirrors(cache, metrics, config.api_key, _peer_tls(config)),
    )
    runner, draw = _runner(model, config, cache)
    engine.loop = StepLoop(
        cache, runner, scheduler, engine.deliver, engine.died, threads=threads, draw=draw
    )
    metrics.watch(engine)
    return engine


def _dtype(config: EngineConfig) -> torch.dtype:
    """What weights and KV are in; the small models that are made up stay comparable to the bit."""
    if config.dtype != "auto":
        dtype: torch.dtype = getattr(torch, config.dtype)
        return dtype
    exact = config.model in ("tiny", "mock") or (config.device == "cpu" and not multiplies_bf16())
    return torch.float32 if exact else torch.bfloat16


def _peer_tls(config: EngineConfig) -> ssl.SSLContext | None:
    """What verifies peers, which are reached by https where this engine is."""
    if not config.url.startswith("https:"):
        return None
    return ssl.create_default_context(cafile=config.router_ca or None)


def _runner(
    model: LoadedModel, config: EngineConfig, cache: KVCache
) -> tuple[ModelRunner | MockRunner, Draw]:
    """What computes a step, and what draws from its logits."""
    if model.transformer is not None:
        return ModelRunner(model, cache), sample
    runner = MockRunner(
        cache, step_ms=config.step_ms, prefill_tokens_per_ms=config.prefill_tokens_per_ms
    )
    return runner, mock_sample


def _stores(config: EngineConfig, layout: KVLayout, fingerprint: str) -> list[Store]:
    """Room below the pool, fastest first."""
    stores: list[Store] = []
    pinned = config.device == "cuda"
    if config.host_pages:
        wanted, there = config.host_pages * layout.page_bytes, _memory()
        if wanted > there:
            raise BadRequest(
                f"--host-pages {config.host_pages} takes {wanted >> 20} MiB; "
                f"this machine has {there >> 20}",
                param="host_pages",
            )
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


def _memory() -> int:
    """Bytes of this machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _layout(model: LoadedModel, config: EngineConfig, dtype: torch.dtype) -> KVLayout:
    """The pool's shape; its pages as asked for, or chosen from the machine's memory."""
    shape = model.config

    def layout(pages: int) -> KVLayout:
        return KVLayout(
            shape.num_layers,
            pages,
            config.page_size,
            shape.num_kv_heads,
            shape.head_dim,
            dtype,
        )

    if config.pool_pages:
        return layout(config.pool_pages + 1)  # and the scratch page
    if model.transformer is None:
        return layout(MOCK_PAGES + 1)  # its pages are so small that memory is no measure
    one = layout(1)
    room = int(min(_memory() * POOL_SHARE, POOL_MOST)) // one.page_bytes
    return layout(max(room, CONTEXTS * one.pages_for(shape.context_length)) + 1)


def _kv_digest(model: LoadedModel) -> str:
    """What keys and values depend on beside the layout: the weights, and RoPE with the config."""
    what = f"{model.weights_digest}|{model.config}"
    if model.quantization != "none":
        what += f"|{model.quantization}"
    return hashlib.blake2b(what.encode(), digest_size=16).hexdigest()
