"""Options under headings, of which `--help` lists the often-used ones and `--help-all` all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

__all__ = ["CONTEXT", "OTHERS", "GroupedCommand", "GroupedOption", "option"]

CONTEXT = {"help_option_names": ["-h", "--help"]}  # of each command, also when called by itself

F = TypeVar("F", bound=Callable[..., Any])
OTHERS = "Options"
SHOW_ALL = f"{__name__}.show_all"  # in a context's `meta`: the help lists rare options too


class GroupedOption(click.Option):
    """An option that the help lists under the heading `group`.

    Only `--help-all` lists a `rare` one. The value of a `secret` one is never printed. That of a
    `path` one is the path of a file or a folder.
    """

    def __init__(
        self,
        *args: Any,
        group: str = OTHERS,
        rare: bool = False,
        secret: bool = False,
        path: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.group = group
        self.rare = rare
        self.secret = secret
        self.path = path


class GroupedCommand(click.Command):
    """A command whose help lists options under headings, in the order of their first options.

    Options without a group come last. A command with rare options has `--help-all`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"context_settings": CONTEXT, **kwargs})
        self._help_all: click.Option | None = None

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        params = super().get_params(ctx)
        if rare := sum(map(_is_rare, params)):
            if self._help_all is None:
                self._help_all = GroupedOption(
                    ["--help-all"],
                    is_flag=True,
                    is_eager=True,
                    expose_value=False,
                    callback=_show_all,
                    help=f"Show all options: {rare} more.",
                )
            params = [*params, self._help_all]
        return params

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if _is_rare(param) and SHOW_ALL not in ctx.meta:
                continue
            record = param.get_help_record(ctx)
            if isinstance(param, click.Option) and record:
                groups.setdefault(getattr(param, "group", OTHERS), []).append(record)
        for heading in sorted(groups, key=lambda heading: heading == OTHERS):
            with formatter.section(heading):
                formatter.write_dl(groups[heading])


def _is_rare(param: click.Parameter) -> bool:
    return isinstance(param, GroupedOption) and param.rare


def _show_all(ctx: click.Context, _param: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        ctx.meta[SHOW_ALL] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


def option(*names: str, group: str = OTHERS, **attributes: Any) -> Callable[[F], F]:
    """`click.option` with a heading, and with the other attributes of `GroupedOption`."""
    return click.option(*names, cls=GroupedOption, group=group, **attributes)
