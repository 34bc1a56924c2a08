"""`microserve engine` and `microserve router`: one process each."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

import click

from engine.protocol import EngineConfig, MicroserveError
from router.base.config import RouterConfig
from router.base.environment import PREFIX, child_environment
from router.cli.options import config_options, given, read_params
from router.cli.preflight import Mistake, check_address, check_strategy
from router.server import run
from router.supervisor.fleet import as_arguments
from router.telemetry.logs import set_up_logging

__all__ = ["engine", "router"]


@click.command()
@click.argument("model")
@config_options(EngineConfig)
def engine(model: str, **flags: Any) -> None:
    """Run one engine. MODEL: smollm2, tiny, mock, a folder, a .gguf file or a hub id."""
    flags = given(EngineConfig, flags)
    keys = {
        f"{PREFIX}_ENGINE_{name.upper()}": flags.pop(name)
        for name in ("api_key", "admin_key")
        if name in flags
    }
    argv = [sys.executable, "-m", "engine", model, *as_arguments(flags)]
    os.execve(sys.executable, argv, {**child_environment(), **keys})  # noqa: S606  no shell wanted


def _new_event_loop() -> asyncio.AbstractEventLoop:
    """uvloop's, on platforms that have it."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


@click.command()
@click.option("--engine", "engines", multiple=True, metavar="URL", help="an engine; repeatable")
@click.option("--strategy", default="data_parallel", show_default=True, metavar="NAME|FILE.py")
@click.option("--param", "params", multiple=True, metavar="K=V", help="of the strategy")
@config_options(RouterConfig)
def router(engines: tuple[str, ...], strategy: str, params: tuple[str, ...], **flags: Any) -> None:
    """Run the router in front of engines that already run."""
    config = RouterConfig(engines=engines, strategy=strategy, params=read_params(params), **flags)
    if not config.parent_pid:  # else `up` has done so already
        check_address(config.host, config.port)
        check_strategy(strategy, config.params)
    set_up_logging(config.log_level, config.log_format)
    try:
        with asyncio.Runner(loop_factory=_new_event_loop) as runner:
            runner.run(run(config))
    except (MicroserveError, OSError, OverflowError) as error:
        raise Mistake(str(error)) from None
