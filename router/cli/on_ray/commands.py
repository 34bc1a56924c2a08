"""`microserve status`, `scale` and `down`."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from typing import Any
from urllib.parse import urlsplit

import click

from router.base import print_table, table_console, table_of
from router.cli.on_ray.connected import fleet_on, fleet_options, wait_option
from router.cli.options import GroupedCommand, Number, option
from router.ray_fleet import Line

__all__ = ["down", "scale", "status"]


@click.command(cls=GroupedCommand)
@fleet_options
@option("--json", "as_json", is_flag=True, help="print one JSON object, keys included")
@option("--targets", is_flag=True,
        help="print what a Prometheus file_sd_configs file says: the addresses of /metrics",
)  # fmt: skip
def status(on: str, fleet: str, as_json: bool, targets: bool) -> None:
    """Show the engines and routers of a fleet on Ray."""
    with fleet_on(on, fleet) as one:
        config, lines = one.spec().config, one.lines()
        unused = one.unused_places()
    if targets:
        click.echo(json.dumps([_target(fleet, line) for line in lines if line.url], indent=2))
        return
    if as_json:
        shown: dict[str, Any] = {"fleet": fleet, "model": config.model, "unused_places": unused}
        shown["admin_key"] = config.admin_key
        shown["engine_api_key"] = config.engine_api_key
        shown["members"] = [_member(line) for line in lines]
        click.echo(json.dumps(shown))
        return
    table = table_of("name", "role", "node", "state", ">restarts", "url")
    for line in lines:
        member = line.member
        role = "router" if member.kind == "router" else member.role
        table.add_row(member.name, role, line.node, line.state, str(line.restarts), line.url)
    print_table(table, table_console())
    ready = sum(line.state == "ready" for line in lines)
    kinds = Counter(line.member.kind for line in lines)
    click.echo(
        f"fleet {fleet}: {config.model}, {kinds['engine']} engines, {kinds['router']} routers, "
        f"{ready} of {len(lines)} ready" + (f", {unused} reserved places unused" if unused else "")
    )
    for line in lines:
        if line.state not in ("ready", "leaving") and line.problem:
            click.echo(f"{line.member.name}: {line.problem.splitlines()[-1]}")


def _member(line: Line) -> dict[str, Any]:
    """Return a member as JSON shows it."""
    rest = {name: value for name, value in asdict(line).items() if name != "member"}
    return {
        "name": line.member.name,
        "kind": line.member.kind,
        "role": line.member.role,
        **rest,
    }


def _target(fleet: str, line: Line) -> dict[str, Any]:
    labels = {"fleet": fleet, "member": line.member.name, "kind": line.member.kind}
    parts = urlsplit(line.url)
    return {
        "targets": [parts.netloc],
        "labels": {**labels, "role": line.member.role, "__scheme__": parts.scheme},
    }


@click.command(cls=GroupedCommand)
@option("--engines", type=Number(int, 0), metavar="N", group="Engines",
        help="number of engines for any role")  # fmt: skip
@option("--prefill", type=Number(int, 0), metavar="N", group="Engines",
        help="number of engines that prefill")  # fmt: skip
@option("--decode", type=Number(int, 0), metavar="N", group="Engines",
        help="number of engines that decode")  # fmt: skip
@fleet_options
@wait_option(300.0, "time until added engines are ready, and until one that leaves is empty (s)")
def scale(
    engines: int | None,
    prefill: int | None,
    decode: int | None,
    on: str,
    fleet: str,
    wait_s: float,
) -> None:
    """Change how many engines of each role a fleet on Ray has.

    Roles that are not named stay as they are. Engines that leave get no new requests, and their
    running ones go on elsewhere, before they end.
    """
    given = {"any": engines, "prefill": prefill, "decode": decode}
    wanted = {role: count for role, count in given.items() if count is not None}
    if not wanted:
        raise click.UsageError("say how many: --engines N, --prefill N, --decode N")
    with fleet_on(on, fleet) as one:
        one.scale(wanted, click.echo, wait_s)


@click.command(cls=GroupedCommand)
@fleet_options
def down(on: str, fleet: str) -> None:
    """End a fleet on Ray.

    Its routers end first, then its engines; what Ray had reserved for them is free again.
    """
    with fleet_on(on, fleet) as one:
        if not one.exists():
            raise click.ClickException(f"there is no fleet {fleet!r} on this cluster")
        one.down(click.echo)
        click.echo(f"fleet {fleet} is gone")
