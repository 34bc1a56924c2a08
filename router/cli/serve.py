"""`microserve engine` and `microserve router`: one process each."""

from __future__ import annotations

import asyncio
import io
import os
import sys
from pathlib import Path
from typing import Any

import click

from engine.protocol import EngineConfig, MicroserveError
from router.base import (
    PREFIX,
    RouterConfig,
    StartFailed,
    child_environment,
    import_from,
    module_command,
    root_cause,
)
from router.cli.options import (
    GroupedCommand,
    ModelName,
    StrategyName,
    config_options,
    given,
    option,
    read_params,
    with_vllm_flags,
)
from router.cli.preflight import Mistake, check_address, check_store, check_strategy
from router.server import run
from router.supervision import is_user_record
from router.supervisor import as_arguments
from router.telemetry import set_up_logging
from router.workers import run_workers

__all__ = ["engine", "router"]


@click.command(cls=GroupedCommand)
@click.argument("model", type=ModelName())
@click.argument("vllm_flags", nargs=-1, type=click.UNPROCESSED, metavar="[-- VLLM'S FLAGS]")
@config_options(EngineConfig)
def engine(model: str, vllm_flags: tuple[str, ...], **flags: Any) -> None:
    """Run one engine.

    MODEL is smollm2, tiny, mock, a folder, a .gguf file or a Hugging Face id. Engines that exchange
    KV need the same MICROSERVE_SECRET in their environment. With --backend vllm, what follows a
    lone -- goes to vLLM.
    """
    flags = given(EngineConfig, with_vllm_flags(flags, vllm_flags))
    keys = {
        f"{PREFIX}_ENGINE_{name.upper()}": flags.pop(name)
        for name in ("api_key", "admin_key")
        if name in flags
    }
    argv = module_command("engine", model, *as_arguments(flags))
    os.execve(sys.executable, argv, {**child_environment(), **keys})  # noqa: S606  needs no shell


def _new_event_loop() -> asyncio.AbstractEventLoop:
    """Return a uvloop event loop on platforms that have it, else asyncio's."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


@click.command(cls=GroupedCommand)
@option("--engine", "engines", multiple=True, metavar="URL", group="Engines",
        help="URL of an engine; repeatable")  # fmt: skip
@option("--strategy", default="data_parallel", show_default=True, type=StrategyName(),
        metavar="NAME|FILE.py", group="Strategy", help="strategy that routes requests")  # fmt: skip
@option("--param", "params", multiple=True, metavar="K=V", group="Strategy",
        help="parameter of the strategy; repeatable")  # fmt: skip
@config_options(RouterConfig)
def router(engines: tuple[str, ...], strategy: str, params: tuple[str, ...], **flags: Any) -> None:
    """Run a router in front of running engines."""
    config = RouterConfig(engines=engines, strategy=strategy, params=read_params(params), **flags)
    if not config.parent_pid:  # `up` has checked these already
        check_address(config.host, config.port)
        check_store(config.store, config.store_password_file)
        check_strategy(strategy, config.params)
    set_up_logging(config.log_level, config.log_format, is_users=is_user_record)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # what strategies print appears at once
    import_from(Path.cwd())  # modules of strategies
    try:
        with asyncio.Runner(loop_factory=_new_event_loop) as runner:
            runner.run(run(config) if config.workers == 1 else run_workers(config))
    except (MicroserveError, StartFailed, OSError, OverflowError, ExceptionGroup) as error:
        cause = root_cause(error)
        if not isinstance(cause, MicroserveError | StartFailed | OSError | OverflowError):
            raise
        raise Mistake(str(cause)) from None
