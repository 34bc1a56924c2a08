"""`microserve config show` and `config check`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from router.base import PREFIX
from router.cli.config.checks import check
from router.cli.config.effective import effective, read_effective
from router.cli.config.fleet_file import read_fleet_file
from router.cli.config.problems import Invalid
from router.cli.config.schema import Schema
from router.cli.config.shown import as_json, as_lines
from router.cli.options import CONTEXT, GroupedCommand, GroupedOption

__all__ = ["config_group"]


def config_group(up: click.Command) -> click.Group:
    """Return the command `config`, for the configuration of the command `up`."""

    @click.group(context_settings=CONTEXT)
    def config() -> None:
        """Show or check the configuration of `up`."""

    @config.command("check")
    @click.argument("file", type=click.Path(path_type=Path))
    @click.pass_context
    def check_command(context: click.Context, file: Path) -> None:
        """Check FILE, which `up --config` reads, and list all mistakes with their lines."""
        schema = Schema.of(up)
        try:
            found = effective(schema, read_fleet_file(file, schema))
            check(found)
        except Invalid as error:
            click.echo(str(error), err=True)
            context.exit(2)
        count = sum(pool.count for pool in found.pools)
        click.echo(f"{file}: ok, {_many(count, 'engine')} in {_many(len(found.pools), 'pool')}")

    @click.pass_context
    def show(context: click.Context, /, json: bool, changed: bool, **_flags: Any) -> None:
        """Show what `up` would run with, given the same arguments, and where each value is from.

        Keys are masked. Variables of the environment are those of `up`.
        """
        try:
            found = read_effective(context, up)
        except Invalid as error:
            click.echo(str(error), err=True)
            context.exit(2)
        if json:
            click.echo(as_json(found, changed=changed))
        else:
            for line in as_lines(found, changed=changed):
                click.echo(line)

    own = [
        GroupedOption(["--json"], is_flag=True, group="Output", help="print one JSON object"),
        GroupedOption(["--changed"], is_flag=True, group="Output", help="leave out defaults"),
    ]
    settings = {**CONTEXT, "auto_envvar_prefix": f"{PREFIX}_UP"}
    config.add_command(
        GroupedCommand(
            "show",
            callback=show,
            params=[*own, *up.params],
            help=show.__doc__,
            context_settings=settings,
        )
    )
    return config


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
