"""`microserve up --on`: a fleet on a Ray cluster, in the foreground or detached."""

from __future__ import annotations

import secrets
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar

import click

from router.cli.config import Effective
from router.cli.on_ray.connected import DEFAULT_FLEET, fleet_on, wait_option
from router.cli.options import Number, option
from router.ray_fleet import Line, RayFleet, RayFleetSpec
from router.supervisor import FleetConfig, write_state

__all__ = ["ray_options", "read_ray_flags", "up_on_ray"]

F = TypeVar("F", bound=Callable[..., Any])
SHIPPED = (  # files that routers get by Ray
    "api_key_file", "store_password_file", "tls_cert", "tls_key", "engine_ca", "engine_cert",
    "engine_cert_key",
)  # fmt: skip
WATCH_S = 1.0


@dataclass(frozen=True, slots=True)
class RayFlags:
    """What `up` was told about Ray."""

    on: str
    detach: bool
    fleet: str
    routers: int
    num_cpus: float
    num_gpus: float
    router_cpus: float
    wait_s: float
    host: str  # empty: the address of each router's node


def ray_options(command: F) -> F:
    """Add the options of `up` for Ray."""
    cpus = Number(float, 0, 1e6)
    for add in reversed((
        option("--on", "on", default="", metavar="ADDRESS", group="Ray",
               help="Ray cluster to run on: auto, ray://HOST:PORT, or HOST:PORT of its head"),
        option("--detach", is_flag=True, group="Ray",
               help="return once all are ready, and leave the fleet running"),
        option("--fleet", default=DEFAULT_FLEET, show_default=True, group="Ray",
               help="name of the fleet, for status, scale and down"),
        option("--routers", type=Number(int, 1, 64), default=1, show_default=True, group="Ray",
               help="number of routers; several need --store"),
        option("--num-cpus", type=cpus, default=1.0, show_default=True, group="Ray",
               help="CPUs that Ray reserves for each engine; also its threads, if not --threads"),
        option("--num-gpus", type=cpus, group="Ray",
               help="GPUs for each engine  [default: its workers with --device cuda, else 0]"),
        option("--router-cpus", type=cpus, default=1.0, show_default=True, rare=True, group="Ray",
               help="CPUs that Ray reserves for each router"),
        wait_option(300.0, "time until all are ready, also until the cluster has room (s)"),
    )):  # fmt: skip
        command = add(command)
    return command


def read_ray_flags(effective: Effective) -> RayFlags | None:
    """Return the flags for Ray; `None` without `--on`. Raises `click.UsageError`."""
    top = {name: entry.value for name, entry in effective.top.items()}
    names = ("detach", "fleet", "routers", "num_cpus", "num_gpus", "router_cpus", "wait_s")
    if not top["on"]:
        for name in names:
            if effective.top[name].layer != "default":
                raise click.UsageError(f"--{name.replace('_', '-')} needs --on")
        return None
    if top["routers"] > 1 and not effective.keys["store"].value:
        raise click.UsageError("several --routers need --store, by which they agree")
    if top["num_gpus"] is None:
        workers = {pool.engine["tp"].value * pool.engine["pp"].value for pool in effective.pools
                   if pool.engine["device"].value == "cuda"}  # fmt: skip
        top["num_gpus"] = float(max(workers, default=0))
    host = effective.router["host"]
    return RayFlags(
        on=top["on"],
        **{name: top[name] for name in names},
        host="" if host.layer == "default" else host.value,
    )


def up_on_ray(flags: RayFlags, config: FleetConfig, router: Mapping[str, str]) -> None:
    """Start the fleet. Without `--detach`, show what happens to it until a signal, and end it.

    `router` has the router's settings. Raises `click.ClickException`.
    """
    spec = _spec(flags, config, router)
    with fleet_on(flags.on, flags.fleet, logs=not flags.detach) as fleet, _signals_raise():
        try:
            engines = sum(pool.count for pool in config.pools)
            click.echo(f"starting {engines} engines on Ray …", err=True)
            fleet.create(spec, click.echo, flags.wait_s)
        except _Stopped:
            raise click.ClickException("stopped before it was ready; nothing is left") from None
        lines = fleet.lines()
        _announce(lines, config)
        _warn_of_hosts(lines, config)
        if config.state_file is not None:
            _write_state(config.state_file, lines, spec.config)
        if flags.detach:
            click.echo(f"detached; `microserve down --fleet {flags.fleet}` ends it", err=True)
            return
        try:
            _show_changes(fleet, lines)
        except _Stopped:
            click.echo("stopping the routers, then the engines", err=True)
        finally:
            with _signals_ignored():
                fleet.down(lambda line: click.echo(line, err=True))
            if config.state_file is not None:
                config.state_file.unlink(missing_ok=True)


def _spec(flags: RayFlags, config: FleetConfig, router: Mapping[str, str]) -> RayFleetSpec:
    files = {}
    for name in SHIPPED:
        if router.get(name):
            path = Path(router[name])
            files[f"--{name.replace('_', '-')}"] = (f"{name}-{path.name}", path.read_bytes())
    strategy = router["strategy"]
    if strategy.endswith(".py"):
        files["--strategy"] = (Path(strategy).name, Path(strategy).read_bytes())
    return RayFleetSpec(
        name=flags.fleet,
        config=replace(
            config,
            host=flags.host,
            admin_key=config.admin_key or secrets.token_hex(32),
            engine_api_key=config.engine_api_key or secrets.token_hex(32),
        ),
        secret=secrets.token_hex(32),
        routers=flags.routers,
        num_cpus=flags.num_cpus,
        num_gpus=flags.num_gpus,
        router_cpus=flags.router_cpus,
        files=files,
    )


def _announce(lines: list[Line], config: FleetConfig) -> None:
    urls = [line.url for line in lines if line.member.kind == "router"]
    for url in urls:
        click.echo(f"ready {url}")
    click.echo(config.first_request(urls[0]))


def _warn_of_hosts(lines: list[Line], config: FleetConfig) -> None:
    """Say that no KV travels between hosts by shared memory alone, if it would have to."""
    hosts = {line.node.rpartition(" ")[2] for line in lines if line.member.kind == "engine"}
    if len(hosts) > 1 and any(pool.flags.get("transport") == "shm" for pool in config.pools):
        click.echo("engines on different hosts exchange no KV with --transport shm", err=True)


def _write_state(path: Path, lines: list[Line], config: FleetConfig) -> None:
    routers = [{"url": line.url, "pid": line.pid} for line in lines if line.member.kind == "router"]
    state = {
        "router": routers[0],
        "routers": routers,
        "engines": [
            {"id": line.member.name, "url": line.url, "pid": line.pid, "role": line.member.role}
            for line in lines
            if line.member.kind == "engine"
        ],
        "admin_key": config.admin_key,
        "engine_api_key": config.engine_api_key,
    }
    write_state(path, state)


def _show_changes(fleet: RayFleet, lines: list[Line]) -> NoReturn:
    """Print a line whenever a member changes its state, until a signal."""
    known = {line.member.name: line for line in lines}
    while True:
        time.sleep(WATCH_S)
        now = {line.member.name: line for line in fleet.lines()}
        for name, line in now.items():
            before = known.get(name)
            if before is None or (before.state, before.url) != (line.state, line.url):
                place = f" {line.url} (node {line.node})" if line.state == "ready" else ""
                click.echo(f"{name} {line.state}{place}")
        for name in known.keys() - now.keys():
            click.echo(f"{name} removed")
        if not now:
            raise click.ClickException("the fleet was ended by another command")
        known = now


class _Stopped(BaseException):
    """A signal asks to stop."""


@contextmanager
def _signals_raise() -> Iterator[None]:
    """Raise `_Stopped` in this thread at the first SIGINT, SIGTERM or SIGHUP."""

    def stop(_number: int, _frame: FrameType | None) -> NoReturn:
        raise _Stopped

    with _handling(stop):
        yield


@contextmanager
def _signals_ignored() -> Iterator[None]:
    with _handling(signal.SIG_IGN):
        yield


@contextmanager
def _handling(handler: Any) -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    old = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, before in old.items():
            signal.signal(number, before)
