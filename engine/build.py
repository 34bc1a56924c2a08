"""The composition root: builds an engine from its configuration."""

from __future__ import annotations

import hashlib
import os
import ssl
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import quote

import torch

from engine.execution.model_runner import ModelRunner
from engine.execution.step_loop import StepLoop
from engine.execution.stepper import Stepper
from engine.kernels.cpu_features import multiplies_bf16
from engine.mock.runner import MockRunner, mock_sample
from engine.models import LoadedModel, load_model
from engine.protocol import BadRequest
from engine.protocol.config import EngineConfig
from engine.sampling.sampler import sample
from engine.scheduling.scheduler import Scheduler
from engine.service.engine import MicroserveEngine
from engine.service.metrics import EngineMetrics
from engine.service.mirror_tasks import MirrorTasks
from engine.service.readings import engine_readings
from kvcache.cache import KVCache
from kvcache.lease import Identity
from kvcache.memory import KVLayout
from kvcache.page_store import TorchPageStore
from kvcache.tiers import DiskStore, HostStore, TierStore
from kvcache.transport import make_transport
from kvcache.types import EngineId

__all__ = ["build_engine"]

# Without --pool-pages, the pool takes this share of the machine's memory, but at most
# `MAX_POOL_BYTES`, and at least the pages of `MIN_CONTEXTS` sequences of full length.
POOL_SHARE = 0.05
MAX_POOL_BYTES = 4 << 30
MIN_CONTEXTS = 2
MOCK_PAGES = 1 << 16


def build_engine(config: EngineConfig, secret: bytes, epoch: int) -> MicroserveEngine:
    """Load the model and allocate the pool. Call it on the event loop that will serve.

    Does not start the step loop. Raises `ModelError`, `BadRequest` for a bad page size, a missing
    transport or tiers larger than the memory, and `OSError` if the transport cannot listen.
    """
    device = torch.device(config.device)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise BadRequest("--device cuda: torch finds no GPU", param="device")
        # See docs/gpu.md.
        message = "--device cuda: no transport supports pools in GPU memory yet"
        raise BadRequest(message, param="device")
    dtype = _dtype(config)
    threads = config.threads or len(os.sched_getaffinity(0))
    # A thread that computes in parallel keeps its OpenMP team until it ends. With a second team
    # there are more threads than cores, and OpenMP puts threads to sleep after each product: load
    # on a thread that ends before the step loop starts.
    with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(threads,)) as loader:
        model = loader.submit(
            load_model, config.model, dtype=dtype, device=device, quantization=config.quantization
        ).result()
    layout = _layout(model, config, dtype)
    fingerprint = layout.fingerprint(_kv_digest(model))
    transport = make_transport(config.transport, epoch, secret=secret, host=config.host)
    cache = KVCache(
        TorchPageStore.on(transport, layout, query_heads=model.config.num_heads),
        transport,
        identity=Identity(
            EngineId(config.engine_id),
            epoch,
            secret,
            fingerprint,
            config.url,
        ),
        tier_stores=_stores(config, layout, fingerprint),
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
        mirrors=MirrorTasks(cache, metrics, config.api_key, _peer_tls(config)),
    )
    if model.transformer is not None:
        model_runner = ModelRunner(model, cache)
        stepper = Stepper(cache, scheduler, model_runner, sample, engine.deliver, time.monotonic)
    else:
        mock_runner = MockRunner(
            cache, step_ms=config.step_ms, prefill_tokens_per_ms=config.prefill_tokens_per_ms
        )
        stepper = Stepper(
            cache, scheduler, mock_runner, mock_sample, engine.deliver, time.monotonic
        )
    engine.loop = StepLoop(stepper, engine.died, compute_threads=threads)
    metrics.register(engine_readings(engine))
    return engine


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
    return ssl.create_default_context(cafile=config.router_ca or None)


def _stores(config: EngineConfig, layout: KVLayout, fingerprint: str) -> list[TierStore]:
    """Return the stores of the tiers below the pool, fastest first."""
    stores: list[TierStore] = []
    pinned = config.device == "cuda"
    if config.host_pages:
        wanted, available = config.host_pages * layout.page_bytes, _memory()
        if wanted > available:
            raise BadRequest(
                f"--host-pages {config.host_pages} needs {wanted >> 20} MiB; "
                f"this machine has {available >> 20} MiB",
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
    """Return the bytes of this machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _layout(model: LoadedModel, config: EngineConfig, dtype: torch.dtype) -> KVLayout:
    """Return the pool's shape, with the configured number of pages or one that suits the memory."""
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
        return layout(config.pool_pages + 1)  # plus the scratch page
    if model.transformer is None:
        return layout(MOCK_PAGES + 1)  # the mock's pages are tiny: memory sets no limit
    one = layout(1)
    room = int(min(_memory() * POOL_SHARE, MAX_POOL_BYTES)) // one.page_bytes
    return layout(max(room, MIN_CONTEXTS * one.pages_for(shape.context_length)) + 1)


def _kv_digest(model: LoadedModel) -> str:
    """Digest what KV depends on besides the layout: the weights, and RoPE with the config."""
    source = f"{model.weights_digest}|{model.config}"
    if model.quantization != "none":
        source += f"|{model.quantization}"
    return hashlib.blake2b(source.encode(), digest_size=16).hexdigest()
