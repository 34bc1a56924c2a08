"""Runs a vLLM engine: from the configuration to an engine that serves, and its end."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from engine.protocol import EngineConfig, Internal
from engine.vllm.core.settings import SECRET, CoreSettings
from engine.vllm.core_client import NoteReader
from engine.vllm.flags import check_own, engine_settings
from engine.vllm.versions import check_vllm

__all__ = ["running_vllm"]


@asynccontextmanager
async def _tasks() -> AsyncIterator[asyncio.TaskGroup]:
    """Run a task group; a lone failure of its body or of a task is raised as itself."""
    try:
        async with asyncio.TaskGroup() as tasks:
            yield tasks
    except BaseExceptionGroup as failures:
        if len(failures.exceptions) == 1:
            raise failures.exceptions[0] from None
        raise


@asynccontextmanager
async def running_vllm(config: EngineConfig, secret: bytes, epoch: int) -> AsyncIterator[Any]:
    """Run vLLM and its engine core while the body runs; yield a `VllmEngine`.

    Raises `ModelError`; `BadRequest` for a vLLM that is too old or too new, and for flags that
    cannot work; `Internal` if vLLM does not start.
    """
    check_own(config)
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # By default vLLM warns once per weight, and of what nobody can change.
    quiet = config.log_level in ("warning", "error")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR" if quiet else config.log_level.upper())
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    os.environ.setdefault(SECRET, secret.hex())
    check_vllm()
    from vllm.v1.engine.async_llm import AsyncLLM

    from engine.models import find_folder
    from engine.vllm.engine import VllmEngine

    model = await asyncio.to_thread(find_folder, config.model)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is in the folder
    notes = NoteReader()
    early: list[dict[str, Any]] = []  # before there is an engine
    on_note = early.append
    async with notes.listening(lambda note: on_note(note)):
        ports = config.kv_port_range
        extra = CoreSettings(
            engine_id=config.engine_id,
            epoch=epoch,
            url=config.url,
            weights=model.weights,
            notes=notes.path,
            transport=config.transport,
            kv_host=config.kv_address,
            kv_ports=(ports.start, ports.stop),
            kv_interface=config.kv_interface,
            verify_puts=config.verify_puts,
            lead=os.getpid(),
        ).values()
        settings = engine_settings(config, str(model.path), extra)
        try:
            llm = AsyncLLM.from_vllm_config(settings, disable_log_stats=True)
        except Exception as error:  # vLLM raises what it likes
            raise Internal(f"vLLM does not start: {error}") from error
        try:
            async with _tasks() as tasks:
                engine = VllmEngine(llm, model, config, epoch, tasks)
                await engine.connect()
                for note in early:
                    engine.on_note(note)
                on_note = engine.on_note
                try:
                    yield engine
                finally:
                    engine.close()
        finally:
            llm.shutdown()
