"""`microserve completion`: the script by which a shell completes commands, flags and values."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from router.cli.options import GroupedCommand

__all__ = ["completion"]

NAME, VARIABLE = "microserve", "_MICROSERVE_COMPLETE"  # that click's protocol derives from the name


@click.command(cls=GroupedCommand)
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print a shell's completion script.

    In bash, `eval "$(microserve completion bash)"` switches it on for one session.
    """
    found = get_completion_class(shell)
    if found is None:
        raise click.ClickException(f"click completes nothing in {shell}")
    click.echo(found(context.find_root().command, {}, NAME, VARIABLE).source())
