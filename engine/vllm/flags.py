"""vLLM's settings, from this engine's flags and from vLLM's own."""

from __future__ import annotations

import argparse
import dataclasses
import io
import os
import shlex
from contextlib import redirect_stderr
from typing import Any

from engine.protocol import BadRequest, EngineConfig
from engine.sizing import read_memory

__all__ = ["check_own", "engine_settings"]

# Flags of this project's own engine that mean nothing to vLLM's.
OWN_ENGINE = (
    "device", "quantization", "host_pages", "disk_pages", "disk_dir", "disk_keep", "preemption",
    "decode_slowdown", "lend_share", "lend_compute", "borrow", "step_ms", "prefill_tokens_per_ms",
)  # fmt: skip
# vLLM's arguments that are set here, or that its blocks cannot be moved with.
REFUSED = {
    "model": "the model is the first argument of the engine",
    "kv_transfer_config": "the connector is this engine's own",
    "kv_events_config": "the events of the prefix cache are this engine's own",
    "worker_extension_cls": "the worker's extension is this engine's own",
    "enable_lora": "KV of LoRA adapters cannot be moved yet",
    "speculative_config": "KV cannot be moved with speculative decoding yet",
}
ONE_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
ONE = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
ATTENTION_TOKENS = 32
POOL_SHARE = 0.5  # of the memory, for the KV of all engines of a machine
AVAILABLE_SHARE = 0.8  # of what is not in use: vLLM refuses to start with less than it asks for
MOST_POOL = 4 << 30  # bytes, unless a flag asks for more


def engine_settings(config: EngineConfig, model: str, extra: dict[str, Any]) -> Any:
    """Return vLLM's `VllmConfig` for a model folder; `extra` goes to the connector.

    `check_own` comes before, since it needs no vLLM.

    Sets environment variables that vLLM reads. Raises `BadRequest` for flags that cannot work.
    """
    from vllm.config import KVEventsConfig, KVTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    if not current_platform.is_cpu():
        raise BadRequest(
            "--backend vllm: KV in GPU memory cannot be moved yet; put a router in front of vLLM's "
            "own server instead: --engine openai+http://HOST:PORT",
            param="backend",
        )
    parser = FlexibleArgumentParser(prog="--backend vllm … --", exit_on_error=False)
    defaults = vars(AsyncEngineArgs.add_cli_args(parser).parse_args([]))
    said = io.StringIO()  # its usage, and what is wrong in the last line
    try:
        with redirect_stderr(said):
            given = vars(parser.parse_args(shlex.split(config.vllm_args)))
    except (ValueError, SystemExit, argparse.ArgumentError) as error:
        problem = said.getvalue().strip().rpartition("error: ")[2] or error
        raise BadRequest(f"vLLM does not take its flags: {problem}", param="vllm_args") from None
    changed = {name for name, value in given.items() if value != defaults[name]}
    _check_given(given, changed)
    args = AsyncEngineArgs.from_cli_args(argparse.Namespace(**given))
    args.model = model
    args.served_model_name = [config.model]
    args.kv_transfer_config = KVTransferConfig(
        kv_connector="MicroserveConnector",
        kv_connector_module_path="engine.vllm.core.connector",
        kv_role="kv_both",
        kv_connector_extra_config=extra,
    )
    args.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    args.worker_extension_cls = "engine.vllm.core.calls.MicroserveWorker"
    for name, value in {
        "dtype": config.dtype if config.dtype != "auto" else None,
        "max_model_len": config.max_model_len or -1,  # -1: as much as the pool holds
        "num_gpu_blocks_override": config.pool_pages + 1 if config.pool_pages else None,
        "block_size": config.page_size if config.page_size != EngineConfig.page_size else None,
        "max_num_seqs": config.max_batch if config.max_batch != EngineConfig.max_batch else None,
        "max_num_batched_tokens": (
            config.token_budget if config.token_budget != EngineConfig.token_budget else None
        ),
        "scheduling_policy": "priority",
        "disable_log_stats": True,
    }.items():
        if value is not None and name not in changed:
            setattr(args, name, value)
    _use_cores(config)
    # By its short name, vLLM would take another one on CPUs: a worker in a process of its own,
    # whose OpenMP it can set. `_use_cores` has set it.
    if "distributed_executor_backend" not in changed:
        args.distributed_executor_backend = ONE_PROCESS
    if "kv_cache_memory_bytes" not in changed:
        memory = read_memory()
        room = min(int(memory.limit * POOL_SHARE), int(memory.available * AVAILABLE_SHARE))
        args.kv_cache_memory_bytes = min(int(room * config.memory_share), MOST_POOL)
    try:
        settings = args.create_engine_config()
    except (ValueError, NotImplementedError, OSError) as error:
        raise BadRequest(f"vLLM does not take these settings: {_line(error)}") from None
    _check_settings(settings)
    return settings


def check_own(config: EngineConfig) -> None:
    """Refuse flags that only this project's own engine knows. Raises `BadRequest`."""
    for field in dataclasses.fields(config):
        if field.name in OWN_ENGINE and getattr(config, field.name) != field.default:
            flag = field.name.replace("_", "-")
            raise BadRequest(f"--{flag} has no meaning with --backend vllm", param=field.name)


def _check_given(given: dict[str, Any], changed: set[str]) -> None:
    """Refuse vLLM's flags that cannot work."""
    for name, reason in REFUSED.items():
        if name in changed:
            raise BadRequest(f"vLLM's --{name.replace('_', '-')}: {reason}", param="vllm_args")
    for name in ONE:
        if given.get(name, 1) != 1:
            raise BadRequest(
                f"vLLM's --{name.replace('_', '-')} {given[name]}: KV moves between engines of one "
                "worker only, so far",
                param="vllm_args",
            )


def _check_settings(settings: Any) -> None:
    """Refuse what vLLM has decided by itself and that cannot work."""
    if not settings.cache_config.enable_prefix_caching:
        raise BadRequest("vLLM's prefix caching is off, and KV is shared through it")
    model = settings.model_config
    for wrong, what in (
        (model.runner_type != "generate", "does not generate text"),
        (model.is_encoder_decoder, "has an encoder"),
        (model.is_attention_free or model.is_hybrid, "has linear attention"),
        (model.use_mla, "has latent attention"),
        (model.get_sliding_window() is not None, "has sliding windows"),
    ):
        if wrong:
            raise BadRequest(f"the model {what}: its KV cannot be moved between engines yet")
    if (size := settings.cache_config.block_size) % ATTENTION_TOKENS:
        raise BadRequest(
            f"vLLM's --block-size {size}: its attention on CPUs wants a multiple of "
            f"{ATTENTION_TOKENS}"
        )
    backend = settings.parallel_config.distributed_executor_backend
    if settings.parallel_config.world_size != 1 or backend not in ("uni", ONE_PROCESS):
        raise BadRequest(f"vLLM's worker must be in its engine core's process, not {backend}")


def _use_cores(config: EngineConfig) -> None:
    """Tell vLLM which cores to compute on."""
    cores = sorted(os.sched_getaffinity(0))
    if config.threads:
        cores = cores[: config.threads]
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores)))
    os.environ["OMP_NUM_THREADS"] = str(len(cores))


def _line(error: Exception) -> str:
    """Return the first line of an error that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
