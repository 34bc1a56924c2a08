"""`microserve up`: a whole cluster on this machine."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import click

from engine.protocol import EngineConfig
from router.base.config import RouterConfig
from router.base.errors import root_cause
from router.cli.options import config_options, given, read_params
from router.cli.preflight import check_address, check_folder, check_strategy, check_tls
from router.supervisor.fleet import Fleet, FleetConfig, StartFailed, as_arguments

__all__ = ["up"]

ENGINE, ROUTER = EngineConfig(), RouterConfig()  # for their defaults
# Of the engine's flags, those that `up` decides itself or that mean the router here.
OWN = (
    "host", "port", "role", "router", "router_ca", "advertise", "labels", "engine_id", "api_key",
    "admin_key", "tls_cert", "tls_key", "parent_pid",
)  # fmt: skip


# The router's flags that `up` takes besides its own, and passes on.
PASSED_ON = (
    "api_key_file", "requests_per_minute", "tokens_per_minute", "max_queue", "queue_timeout_s",
    "engine_wait_s", "request_timeout_s", "client_stall_s", "shutdown_s", "stream_interval_ms",
    "tls_cert", "tls_key", "log_format",
)  # fmt: skip
BOTH = ("max_body_mb", "log_level")  # flags of the engine that the router has as well


@click.command()
@click.argument("model", default=ENGINE.model)
@click.option("--engines", type=click.IntRange(min=1), help="engines for any role  [default: 2]")
@click.option("--prefill", type=click.IntRange(min=0), default=0, help="engines that prefill")
@click.option("--decode", type=click.IntRange(min=0), default=0, help="engines that decode")
@click.option("--strategy", default=ROUTER.strategy, show_default=True, metavar="NAME|FILE.py")
@click.option("--param", "params", multiple=True, metavar="K=V", help="of the strategy")
@click.option("--host", default=ROUTER.host, show_default=True, help="of the router")
@click.option("--port", default=ROUTER.port, show_default=True, help="of the router")
@click.option("--served-model-name", default="", help="what clients call it; empty: MODEL")
@click.option("--api-key", default="", help="key that clients must send; empty: none")
@click.option("--admin-key", default="", help="key of the admin API; empty: loopback only")
@click.option("--allow-upload", is_flag=True, help="let the admin API load strategies from source")
@click.option(
    "--audit-log", type=click.Path(dir_okay=False, path_type=Path),
    help="file that every change of strategy is appended to",
)  # fmt: skip
@click.option(
    "--health-deadline-s", type=click.FloatRange(min=1.0), default=10.0, show_default=True,
    help="a router that does not answer for so long is restarted (s)",
)  # fmt: skip
@click.option("--no-respawn", is_flag=True, help="do not restart what dies")
@click.option(
    "--state-file", type=click.Path(dir_okay=False, path_type=Path), help="written once ready"
)
@config_options(RouterConfig, only=PASSED_ON)
@config_options(EngineConfig, without=OWN)
def up(
    model: str,
    engines: int | None,
    prefill: int,
    decode: int,
    strategy: str,
    params: tuple[str, ...],
    allow_upload: bool,
    audit_log: Path | None,
    health_deadline_s: float,
    no_respawn: bool,
    host: str,
    port: int,
    served_model_name: str,
    api_key: str,
    admin_key: str,
    state_file: Path | None,
    **flags: Any,
) -> None:
    """Start engines and a router on this machine; Ctrl-C ends all of them.

    MODEL: smollm2 (the default), tiny, mock, a folder, a .gguf file or a hub id.
    """
    if engines is not None and (prefill or decode):
        raise click.UsageError("--engines or --prefill and --decode, not both")
    roles = ("prefill",) * prefill + ("decode",) * decode or ("any",) * (engines or 2)
    check_address(host, port)
    check_folder("--state-file", state_file)
    check_folder("--audit-log", audit_log)
    check_tls(flags["tls_cert"], flags["tls_key"])
    check_strategy(strategy, read_params(params))
    router_args = ["--strategy", strategy]
    for pair in params:
        router_args += ["--param", pair]
    passed_on = {name: flags[name] for name in PASSED_ON + BOTH}
    router_args += as_arguments(given(RouterConfig, passed_on))
    if served_model_name:
        router_args += ["--served-model-name", served_model_name]
    if allow_upload:
        router_args.append("--allow-upload")
    if audit_log is not None:
        router_args += ["--audit-log", str(audit_log)]
    config = FleetConfig(
        model=model,
        roles=roles,
        router_args=tuple(router_args),
        host=host,
        port=port,
        engine_flags=given(EngineConfig, {n: v for n, v in flags.items() if n not in PASSED_ON}),
        admin_key=admin_key,
        api_key=api_key,
        served_model_name=served_model_name,
        respawn=not no_respawn,
        health_deadline_s=health_deadline_s,
        state_file=state_file,
    )
    fleet = Fleet(config, say=click.echo, note=lambda line: click.echo(line, err=True))
    try:
        asyncio.run(_until_told(fleet))
    except (ExceptionGroup, StartFailed, OSError) as error:
        cause = root_cause(error)
        if not isinstance(cause, StartFailed | OSError):
            raise
        raise click.ClickException(str(cause)) from None


async def _until_told(fleet: Fleet) -> None:
    """Run the fleet until a signal; a second one does not wait for children to end nicely."""
    running = asyncio.ensure_future(fleet.run())
    told = 0

    def tell() -> None:
        nonlocal told
        told += 1
        if told == 1:
            running.cancel()
        else:
            fleet.kill()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, tell)
    try:
        await running
    except asyncio.CancelledError:
        if not told:
            raise
