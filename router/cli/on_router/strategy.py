"""`microserve strategy`: list, choose, load and check strategies."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

import click
import httpx

from engine.protocol import MicroserveError
from router.base import changes_of
from router.cli.on_router.admin_client import admin_client, call_admin
from router.cli.on_router.conformance import check_conformance
from router.cli.options import (
    CA_HELP,
    CONTEXT,
    GroupedCommand,
    Number,
    ServerUrl,
    StrategyName,
    option,
    read_params,
    split_flags,
)
from router.cli.preflight import check_strategy
from router.conformance import ALL
from router.dry_run import FleetEngine
from router.rollout import read_source

__all__ = ["strategy"]

WATCH_S = 1.0  # --watch also looks this often, in case a change is not reported
BOUNDS = {
    "minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<",
    "multipleOf": "multiple of", "minLength": "length ≥", "maxLength": "length ≤",
    "pattern": "matches", "minItems": "items ≥", "maxItems": "items ≤",
}  # fmt: skip
params_option = option(
    "--param", "params", multiple=True, metavar="K=V", group="Strategy",
    help="parameter of the strategy; repeatable",
)  # fmt: skip


@click.group(context_settings=CONTEXT)
@click.option("--url", type=ServerUrl(), default="http://127.0.0.1:8000", show_default=True,
              help="the router's URL")  # fmt: skip
@click.option("--admin-key", default="", help="key of the router's admin API")
@click.option("--ca", default="", metavar="FILE", help=CA_HELP)
@click.pass_context
def strategy(context: click.Context, url: str, admin_key: str, ca: str) -> None:
    """List, choose, load and check strategies. All but `check` need a running router."""
    context.obj = context.with_resource(admin_client(url, admin_key, ca))


@strategy.command("list")
@click.pass_obj
def list_(client: httpx.Client) -> None:
    """List all strategies. A star marks the active one, and ~ that of a canary."""
    state = call_admin(client, "GET", "/admin/strategies")
    for one in state["strategies"]:
        star = "~" if one["name"] == _candidate(state).get("name") else " "
        star = "*" if one["name"] == state["active"]["name"] else star
        click.echo(f"{star} {one['name']:<20} {one['doc'].partition(chr(10))[0]}")
    _show_canary(state)


@strategy.command()
@click.argument("name", type=StrategyName(), required=False)
@click.pass_obj
def show(client: httpx.Client, name: str | None) -> None:
    """Show the help and parameters of NAME.

    Without NAME, show the active strategy, the canary, and old versions with requests in flight.
    """
    state = call_admin(client, "GET", "/admin/strategies")
    if name is None:
        _show_running(state)
        return
    for one in state["strategies"]:
        if one["name"] == name:
            click.echo(f"{name}\n\n{one['doc']}\n")
            for param, schema in one["params"].items():
                click.echo(f"  {param}: {_describe(schema)}")
            if _candidate(state).get("name") == name:
                _show_canary(state)
            return
    known = ", ".join(one["name"] for one in state["strategies"])
    raise click.ClickException(
        f"no strategy {name!r}; there are {known}; `microserve strategy load FILE` adds one"
    )


@strategy.command(cls=GroupedCommand)
@click.argument("name", type=StrategyName())
@params_option
@option("--if-generation", type=Number(int, 0), group="Strategy",
        help="fail unless this generation is active")  # fmt: skip
@option("--canary", type=Number(float, 1e-6, 100.0), metavar="PERCENT",
        group="Canary", help="try it on this share of the requests first")  # fmt: skip
@option("--max-error-rate", type=Number(float, 0.0, 1.0), group="Canary",
        help="share of failed requests that it may have, 0 to 1  [default: 0.01]")  # fmt: skip
@option("--max-ttft-p99-ms", type=Number(float, 0.0, 1e12), group="Canary",
        help="99th percentile that its time to first token may have (ms)")  # fmt: skip
@option("--min-requests", type=Number(int, 1, 10**9), group="Canary",
        help="number of requests after which it is judged  [default: 100]")  # fmt: skip
@click.pass_obj
def use(
    client: httpx.Client,
    /,
    name: str,
    params: tuple[str, ...],
    if_generation: int | None,
    canary: float | None,
    **rules: float | None,
) -> None:
    """Make NAME active for new requests."""
    body: dict[str, Any] = {"name": name, "params": read_params(params)}
    if if_generation is not None:
        body["if_generation"] = if_generation
    given = {rule: value for rule, value in rules.items() if value is not None}
    if canary is not None:
        body["canary"] = {"percent": canary, **given}
    elif given:
        raise click.UsageError("these options need --canary PERCENT")
    state = call_admin(client, "PUT", "/admin/strategy", body)
    told = f", with fallbacks: {', '.join(state['fallbacks'])}" if "fallbacks" in state else ""
    click.echo(_generation(state) + (", a canary" if state["canary"] else "") + told)


@strategy.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--watch", is_flag=True, help="keep running, and reload the file whenever it is saved"
)
@click.pass_obj
def load(client: httpx.Client, file: Path, watch: bool) -> None:
    """Load the strategy in FILE; `use` makes it active.

    The strategy's name is its function's name. If FILE has several strategies, the one named like
    FILE is loaded. With --watch, saving the file of the active strategy activates the new version
    with the same parameters; a version that fails to load changes nothing.
    """
    source = _load(client, file, None, keep_on=watch)
    if watch:
        try:
            asyncio.run(_reload(client, file, source))
        except KeyboardInterrupt:
            click.echo()


@strategy.command()
@click.pass_obj
def promote(client: httpx.Client) -> None:
    """Make the canary active now, before there is a verdict about it."""
    canary = call_admin(client, "GET", "/admin/strategies")["canary"]
    if canary is None:
        raise click.ClickException(
            "there is no canary; `microserve strategy use NAME --canary PERCENT` starts one"
        )
    wanted = {"generation": canary["generation"]}
    click.echo(_generation(call_admin(client, "POST", "/admin/promote", wanted)))


@strategy.command()
@click.pass_obj
def rollback(client: httpx.Client) -> None:
    """Go back to the previous strategy.

    If there is a canary, only end that.
    """
    click.echo(_generation(call_admin(client, "POST", "/admin/rollback", {})))


@strategy.command(cls=GroupedCommand)
@click.argument("file", type=StrategyName(), metavar="FILE|NAME")
@params_option
@option("--model", default="tiny", show_default=True, group="Checks", help="the engines' model")
@option("--backend", type=click.Choice(["microserve", "vllm"]), default="microserve",
        show_default=True, group="Checks", help="what computes in the real engines")  # fmt: skip
@option("--engine-flags", multiple=True, metavar="TEXT", group="Checks",
        help="further flags of the first real engine, as one text, such as '--tp 2'; repeat it for "
        "the second and the third",
)  # fmt: skip
@option("--dry-run", is_flag=True, group="Checks",
        help="use simulated engines only; takes a second")  # fmt: skip
@option("--fleet", is_flag=True, group="Checks",
        help="simulated engines support what those of the router at --url do")  # fmt: skip
@option("--only", multiple=True, type=click.Choice([check.__name__ for check in ALL]),
        metavar="CHECK", group="Checks", help="run this check on real engines; repeatable",
)  # fmt: skip
@click.pass_obj
def check(
    client: httpx.Client,
    /,
    file: str,
    params: tuple[str, ...],
    model: str,
    backend: Literal["microserve", "vllm"],
    engine_flags: tuple[str, ...],
    dry_run: bool,
    fleet: bool,
    only: tuple[str, ...],
) -> None:
    """Test a strategy, by file or name.

    It runs on this machine and needs no running router, except with --fleet.

    First comes a dry run on simulated engines, as in a router that loads a strategy: with cold and
    warm caches, one request and several, a cancelled request, and an engine that dies.

    Then three real engines and a router are started. Clients leave and engines are killed at every
    call, and each answer is compared with that of a single engine. The exit code is 1 if a check
    fails, and 2 if the strategy does not load or the engines do not start.
    """
    engines = _engines(client) if fleet else []
    requests, fallbacks = check_strategy(file, read_params(params), engines)
    told = f", with fallbacks: {', '.join(fallbacks)}" if fallbacks else ""
    click.echo(f"{file}: dry run ok, {requests} requests against simulated engines{told}")
    if not dry_run and not check_conformance(
        file, read_params(params), model=model, only=only, backend=backend,
        flags=[split_flags("--engine-flags", text) for text in engine_flags],
    ):  # fmt: skip
        raise click.exceptions.Exit(1)


def _engines(client: httpx.Client) -> list[FleetEngine]:
    """Return the engines of the router that take new work. Raises `ClickException`."""
    names = [field.name for field in fields(FleetEngine)]
    return [
        FleetEngine(**{name: one[name] for name in names})
        for one in call_admin(client, "GET", "/admin/engines")["engines"]
        if one["status"] == "up" and not one["draining"]
    ]


def _load(client: httpx.Client, file: Path, before: str | None, *, keep_on: bool) -> str | None:
    """Load `file` unless its source is `before`, and return its source.

    Raises `ClickException`; with `keep_on` it prints a rejection instead.
    """
    try:
        source = read_source(file)
    except MicroserveError as error:
        if keep_on and before is not None:
            return before  # an editor may be replacing the file
        raise click.ClickException(error.message) from None
    if source == before:
        return source
    try:
        loaded = call_admin(
            client, "POST", "/admin/strategies", {"source": source, "file": str(file)}
        )
        click.echo(f"loaded {loaded['name']}")
        if before is not None:
            _refresh(client, loaded["name"])
    except click.ClickException as error:
        if not keep_on:
            raise
        click.echo(f"not loaded, nothing changed: {error.message}", err=True)
    return source


async def _reload(client: httpx.Client, file: Path, source: str | None) -> None:
    """Load the file whenever it changes, until cancelled."""
    async with aclosing(changes_of(file, WATCH_S)) as changes:
        async for _ in changes:
            source = _load(client, file, source, keep_on=True)


def _refresh(client: httpx.Client, name: str) -> None:
    """Activate the new version if the old one is active."""
    active = call_admin(client, "GET", "/admin/strategies")["active"]
    if active["name"] == name:
        body = {
            "name": name, "params": active["params"], "if_generation": active["generation"],
        }  # fmt: skip
        click.echo(_generation(call_admin(client, "PUT", "/admin/strategy", body)))


def _show_running(state: dict[str, Any]) -> None:
    for one in state["generations"]:
        line = _generation(one) + f", {one['in_flight']} in flight"
        for kind, count in one["offences"].items():
            line += f", {kind} {count}×"
        click.echo(line)
    _show_canary(state)
    if last := state["last_canary"]:
        click.echo(f"generation {last['generation']} was {last['decision']}: {last['why']}")


def _candidate(state: dict[str, Any]) -> dict[str, Any]:
    """Return the generation that is a canary; empty if there is none."""
    number = (state["canary"] or {}).get("generation")
    return next((one for one in state["generations"] if one["generation"] == number), {})


def _show_canary(state: dict[str, Any]) -> None:
    """Print the canary, if there is one: its share, its age, and what it is judged by so far."""
    canary = state["canary"]
    if canary is None:
        return
    text = (
        f"{canary['ended']} of {canary['min_requests']} requests ended, {canary['failed']} failed"
    )
    if canary["max_ttft_p99_ms"] is not None:
        text += f", {canary['slow']} took over {canary['max_ttft_p99_ms']:g} ms to the first token"
    click.echo(
        f"{_generation(_candidate(state))} is a canary with {canary['percent']:g} % of the "
        f"requests since {canary['since']}: {text}, no verdict yet; "
        "`microserve strategy rollback` ends it"
    )


def _describe(schema: dict[str, Any]) -> str:
    """Format a parameter's JSON schema as one line: type, bounds, default, help."""
    kinds = schema.get("anyOf", [schema])
    text = " or ".join(str(kind.get("type", "any")) for kind in kinds)
    if "enum" in schema:
        text = " | ".join(map(str, schema["enum"]))
    bounds = [f"{sign} {schema[key]}" for key, sign in BOUNDS.items() if key in schema]
    text += "".join(f" {bound}" for bound in bounds) + f" = {schema['default']}"
    return text + (f"  {schema['description']}" if "description" in schema else "")


def _generation(one: dict[str, Any]) -> str:
    params = "".join(f" {name}={value}" for name, value in one["params"].items())
    return f"generation {one['generation']}: {one['name']}{params}"
