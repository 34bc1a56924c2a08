"""`microserve up`: engines and a router on this machine."""

from __future__ import annotations

import asyncio
import json
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import click

from engine.protocol import EngineConfig
from router.base import RouterConfig, StartFailed, hide_memory, root_cause
from router.cli.config import (
    ENGINE_OWN,
    KEYS_FILE,
    Effective,
    Invalid,
    check,
    config_group,
    read_effective,
)
from router.cli.on_ray import ray_options, read_ray_flags, up_on_ray
from router.cli.options import (
    GroupedCommand,
    ModelName,
    Number,
    StrategyName,
    config_options,
    given,
    option,
    split_flags,
    with_vllm_flags,
)
from router.cli.preflight import check_address, check_folder, check_store, check_strategy, check_tls
from router.supervisor import Fleet, FleetConfig, Pool, as_arguments

__all__ = ["config", "up"]

ENGINE, ROUTER = EngineConfig(), RouterConfig()  # for their defaults
# Router flags that `up` offers besides its own and passes on.
PASSED_ON = (
    "api_key_file", "allowed_hosts", "requests_per_minute", "tokens_per_minute", "max_connections",
    "max_queue", "queue_timeout_s", "engine_wait_s", "engine_silence_s", "request_timeout_s",
    "attempts", "retry_share", "client_stall_s", "shutdown_s", "stream_interval_ms", "tls_cert",
    "tls_key", "log_format", "workers", "store_password_file", "no_ui",
)  # fmt: skip


@click.command(cls=GroupedCommand)
@click.argument("model", type=ModelName(), default=ENGINE.model)
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
@option("--store", default="", group="Keys", secret=True, rare=True,
        help="URL of the Redis or Valkey by which several routers agree")  # fmt: skip
@ray_options
@option("--config", type=click.Path(path_type=Path), metavar="FILE.toml", group="Server",
        help="file that says what flags say; flags and the environment win over it")  # fmt: skip
@config_options(RouterConfig, only=PASSED_ON)
@config_options(EngineConfig, without=ENGINE_OWN)
@click.pass_context
def up(context: click.Context, /, **_flags: Any) -> None:
    """Start engines and a router.

    They run on this machine, or with --on on a Ray cluster. Ctrl-C ends all of them.

    MODEL is smollm2 (the default), tiny, mock, a folder, a .gguf file or a Hugging Face id. With
    --backend vllm, what follows MODEL and a lone -- goes to vLLM.
    """
    try:
        effective = read_effective(context, up)
        check(effective)
    except Invalid as error:
        click.echo(str(error), err=True)
        context.exit(2)
    config = _fleet_config(effective)
    on_ray = read_ray_flags(effective)
    if on_ray is None:
        check_address(config.host, config.port)
    router = {name: entry.value for name, entry in effective.router.items()}
    check_folder("--state-file", config.state_file)
    check_folder("--audit-log", Path(router["audit_log"]) if router["audit_log"] else None)
    check_tls(router["tls_cert"], router["tls_key"])
    check_store(config.store, router["store_password_file"])
    params = {name: entry.value for name, entry in effective.params.items()}
    check_strategy(router["strategy"], params)
    if on_ray is not None:
        router[KEYS_FILE] = effective.keys[KEYS_FILE].value
        up_on_ray(on_ray, config, {name: str(value or "") for name, value in router.items()})
        return
    if router["allow_upload"]:
        hide_memory()  # this process has the keys in its environment, too
    fleet = Fleet(config, say=click.echo, note=lambda line: click.echo(line, err=True))
    try:
        asyncio.run(_run_until_signal(fleet))
    except (ExceptionGroup, StartFailed, OSError) as error:
        cause = root_cause(error)
        if not isinstance(cause, StartFailed | OSError):
            raise
        raise click.ClickException(str(cause)) from None


config = config_group(up)


def _fleet_config(effective: Effective) -> FleetConfig:
    """Return what runs. Raises `click.UsageError` for flags that do not go together."""
    top = {name: entry.value for name, entry in effective.top.items()}
    keys = {name: entry.value for name, entry in effective.keys.items()}
    router = {name: entry.value for name, entry in effective.router.items()}
    counts = Counter[str]()
    for pool in effective.pools:
        counts[pool.role] += pool.count
    arguments = {
        role: _split(f"--{role}-flags", top[f"{role}_flags"], of=counts[role])
        for role in ("prefill", "decode")
    }
    pools = tuple(
        Pool(
            count=pool.count,
            role=pool.role,
            name=pool.name,
            flags=_engine_flags({name: entry.value for name, entry in pool.engine.items()}),
            arguments=arguments.get(pool.role, ()),
            labels=pool.labels,
        )
        for pool in effective.pools
    )
    passed_on = {n: v for n, v in router.items() if n not in ("host", "port", "params")}
    router_args = as_arguments(given(RouterConfig, {**passed_on, KEYS_FILE: keys[KEYS_FILE]}))
    for name, entry in effective.params.items():
        router_args += ["--param", f"{name}={json.dumps(entry.value)}"]
    return FleetConfig(
        model=top["model"],
        pools=pools,
        router_args=tuple(router_args),
        host=router["host"],
        port=router["port"],
        admin_key=keys["admin_key"],
        api_key=keys["api_key"],
        engine_api_key=keys["engine_api_key"],
        openai_api_key=keys["openai_api_key"],
        store=keys["store"],
        served_model_name=router["served_model_name"],
        respawn=not top["no_respawn"],
        health_deadline_s=top["health_deadline_s"],
        shutdown_s=router["shutdown_s"],
        state_file=Path(top["state_file"]) if top["state_file"] else None,
    )


def _engine_flags(values: dict[str, Any]) -> dict[str, Any]:
    extra = values.pop("vllm_flags")
    return given(EngineConfig, with_vllm_flags(values, extra))


def _split(option: str, text: str, *, of: int) -> tuple[str, ...]:
    """Return the arguments in a text for the `of` engines of a role. Raises `UsageError`."""
    arguments = split_flags(option, text)
    if arguments and not of:
        raise click.UsageError(f"{option} needs engines of that role: --prefill N --decode M")
    if "--" in arguments:
        raise click.UsageError(f"{option}: what follows -- goes behind all flags of up")
    names = [one.partition("=")[0] for one in arguments if one.startswith("--")]
    set_here = [f"--{name.replace('_', '-')}" for name in ENGINE_OWN]
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
