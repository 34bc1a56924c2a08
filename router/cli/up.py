"""`microserve up`: engines and a router on this machine."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import click

from engine.protocol import EngineConfig
from router.base import RouterConfig, StartFailed, hide_memory, root_cause
from router.cli.options import (
    GroupedCommand,
    Number,
    StrategyName,
    config_options,
    given,
    option,
    read_params,
    split_flags,
    with_vllm_flags,
)
from router.cli.preflight import check_address, check_folder, check_strategy, check_tls
from router.supervisor import Fleet, FleetConfig, as_arguments

__all__ = ["up"]

ENGINE, ROUTER = EngineConfig(), RouterConfig()  # for their defaults
# Engine flags that `up` does not offer: it sets them itself, or the name means the router's flag.
OWN = (
    "host", "port", "role", "router", "router_ca", "advertise", "labels", "engine_id", "api_key",
    "admin_key", "allowed_hosts", "max_connections", "tls_cert", "tls_key", "parent_pid",
    "memory_share",
)  # fmt: skip
# Router flags that `up` offers besides its own and passes on.
PASSED_ON = (
    "api_key_file", "allowed_hosts", "requests_per_minute", "tokens_per_minute", "max_connections",
    "max_queue", "queue_timeout_s", "engine_wait_s", "engine_silence_s", "request_timeout_s",
    "attempts", "retry_share", "client_stall_s", "shutdown_s", "stream_interval_ms", "tls_cert",
    "tls_key", "log_format",
)  # fmt: skip
BOTH = ("max_body_mb", "max_bodies_mb", "log_level")  # engine flags that the router has too


@click.command(cls=GroupedCommand)
@click.argument("model", default=ENGINE.model)
@click.argument("vllm_flags", nargs=-1, type=click.UNPROCESSED, metavar="[-- VLLM'S FLAGS]")
@option("--host", default=ROUTER.host, show_default=True, group="Server",
        help="address that the router listens on")  # fmt: skip
@option("--port", default=ROUTER.port, show_default=True, group="Server",
        help="port that the router listens on; 0 picks a free one")  # fmt: skip
@option("--served-model-name", default="", group="Server",
        help="model name that clients use; empty: MODEL")  # fmt: skip
@option("--no-respawn", is_flag=True, group="Server", help="do not restart processes that die")
@option("--health-deadline-s", type=Number(float, 1.0, 1e7), default=10.0, show_default=True,
        rare=True,
        group="Server", help="time without an answer after which the router is restarted (s)",
)  # fmt: skip
@option("--state-file", type=click.Path(dir_okay=False, path_type=Path), group="Server",
        help="file to write URLs and process ids to, once all are ready")  # fmt: skip
@option("--engines", type=Number(int, 1), group="Engines",
        help="number of engines for any role  [default: 2]")  # fmt: skip
@option("--prefill", type=Number(int, 0), default=0, group="Engines",
        help="number of engines that prefill")  # fmt: skip
@option("--decode", type=Number(int, 0), default=0, group="Engines",
        help="number of engines that decode")  # fmt: skip
@option("--prefill-flags", default="", metavar="TEXT", group="Engines",
        help="further flags of the engines that prefill, as one text, such as '--tp 2'",
)  # fmt: skip
@option("--decode-flags", default="", metavar="TEXT", group="Engines",
        help="further flags of the engines that decode, as one text, such as '--pp 2'",
)  # fmt: skip
@option("--strategy", default=ROUTER.strategy, show_default=True, type=StrategyName(),
        metavar="NAME|FILE.py", group="Strategy", help="strategy that routes requests")  # fmt: skip
@option("--param", "params", multiple=True, metavar="K=V", group="Strategy",
        help="parameter of the strategy; repeatable")  # fmt: skip
@option("--allow-upload", is_flag=True, group="Strategy",
        help="let the admin API load strategies from source code")  # fmt: skip
@option("--audit-log", type=click.Path(dir_okay=False, path_type=Path), group="Strategy",
        help="file to which every change of strategy is appended")  # fmt: skip
@option(
    "--api-key",
    default="",
    group="Keys",
    secret=True,
    help="key that clients must send; empty: none",
)
@option("--admin-key", default="", group="Keys", secret=True,
        help="key of the admin API; empty: it answers on loopback only")  # fmt: skip
@option("--engine-api-key", default="", group="Keys", secret=True, rare=True,
        help="key of the engines; empty: a random one, which --state-file names")  # fmt: skip
@config_options(RouterConfig, only=PASSED_ON)
@config_options(EngineConfig, without=OWN)
def up(
    model: str,
    vllm_flags: tuple[str, ...],
    engines: int | None,
    prefill: int,
    decode: int,
    prefill_flags: str,
    decode_flags: str,
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
    engine_api_key: str,
    state_file: Path | None,
    **flags: Any,
) -> None:
    """Start engines and a router on this machine.

    Ctrl-C ends all of them.

    MODEL is smollm2 (the default), tiny, mock, a folder, a .gguf file or a Hugging Face id. With
    --backend vllm, what follows MODEL and a lone -- goes to vLLM.
    """
    flags = with_vllm_flags(flags, vllm_flags)
    if engines is not None and (prefill or decode):
        raise click.UsageError("use either --engines, or --prefill and --decode")
    role_args = {
        "prefill": _split("--prefill-flags", prefill_flags, of=prefill),
        "decode": _split("--decode-flags", decode_flags, of=decode),
    }
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
        hide_memory()  # this process has the keys in its environment, too
    if audit_log is not None:
        router_args += ["--audit-log", str(audit_log)]
    config = FleetConfig(
        model=model,
        roles=roles,
        router_args=tuple(router_args),
        host=host,
        port=port,
        engine_flags=given(EngineConfig, {n: v for n, v in flags.items() if n not in PASSED_ON}),
        role_args=role_args,
        admin_key=admin_key,
        api_key=api_key,
        engine_api_key=engine_api_key,
        served_model_name=served_model_name,
        respawn=not no_respawn,
        health_deadline_s=health_deadline_s,
        shutdown_s=flags["shutdown_s"],
        state_file=state_file,
    )
    fleet = Fleet(config, say=click.echo, note=lambda line: click.echo(line, err=True))
    try:
        asyncio.run(_run_until_signal(fleet))
    except (ExceptionGroup, StartFailed, OSError) as error:
        cause = root_cause(error)
        if not isinstance(cause, StartFailed | OSError):
            raise
        raise click.ClickException(str(cause)) from None


def _split(option: str, text: str, *, of: int) -> tuple[str, ...]:
    """Return the arguments in a text for the `of` engines of a role. Raises `UsageError`."""
    arguments = split_flags(option, text)
    if arguments and not of:
        raise click.UsageError(f"{option} needs engines of that role: --prefill N --decode M")
    if "--" in arguments:
        raise click.UsageError(f"{option}: what follows -- goes behind all flags of up")
    names = [one.partition("=")[0] for one in arguments if one.startswith("--")]
    set_here = [f"--{name.replace('_', '-')}" for name in OWN]
    for name in names:  # engines take abbreviations too
        if any(own.startswith(name) for own in set_here):
            raise click.UsageError(f"{option}: up sets {name} itself")
    return arguments


async def _run_until_signal(fleet: Fleet) -> None:
    """Run the fleet until a signal arrives. A second signal kills all children at once."""
    running = asyncio.ensure_future(fleet.run())
    signals = 0

    def stop() -> None:
        nonlocal signals
        signals += 1
        if signals == 1:
            click.echo("stopping the router, then the engines; a second signal kills", err=True)
            running.cancel()
        else:
            fleet.kill()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop)
    try:
        await running
    except asyncio.CancelledError:
        if not signals:
            raise
