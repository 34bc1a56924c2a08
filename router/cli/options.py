"""Click options: made from the fields of a config, and listed by topic in `--help`."""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
import ssl
import typing
from collections.abc import Callable, Collection
from typing import Any, Literal, TypeVar

import click

from engine.protocol import BadRequest
from router.base import client_context

__all__ = [
    "CA_HELP",
    "CONTEXT",
    "GroupedCommand",
    "Number",
    "config_options",
    "given",
    "option",
    "read_ca",
    "read_params",
    "split_flags",
    "with_vllm_flags",
]

CONTEXT = {"help_option_names": ["-h", "--help"]}  # of each command, also when called by itself

F = TypeVar("F", bound=Callable[..., Any])
OTHERS = "Options"
CA_HELP = "CA certificates (PEM) of an https server; empty: the system's"


class Number(click.ParamType):  # type: ignore[type-arg]  # generic only in newer versions of click
    """A number from `least` to `most`; NaN is none."""

    def __init__(
        self, kind: type[int] | type[float], least: float | None = None, most: float | None = None
    ) -> None:
        self.name = "integer" if kind is int else "float"
        self._kind = kind
        self._least = -math.inf if least is None else least
        self._most = math.inf if most is None else most

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | float:
        try:
            number = self._kind(value)
        except (ValueError, OverflowError):
            self.fail(f"{value!r} is not a valid {self.name}.", param, ctx)
        if not self._least <= number <= self._most:
            bounds = f"{self._least:.12g} or more"
            if self._most < math.inf:
                bounds = f"from {self._least:.12g} to {self._most:.12g}"
            self.fail(f"{value} is not {bounds}.", param, ctx)
        return number


class GroupedOption(click.Option):
    """An option that `--help` lists under the heading `group`."""

    def __init__(self, *args: Any, group: str = OTHERS, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group


class GroupedCommand(click.Command):
    """A command whose `--help` lists options under headings, in the order of their first options.

    Options without a group come last.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"context_settings": CONTEXT, **kwargs})

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if isinstance(param, click.Option) and record:
                groups.setdefault(getattr(param, "group", OTHERS), []).append(record)
        for heading in sorted(groups, key=lambda heading: heading == OTHERS):
            with formatter.section(heading):
                formatter.write_dl(groups[heading])


def option(*names: str, group: str = OTHERS, **attributes: Any) -> Callable[[F], F]:
    """`click.option` with a heading."""
    return click.option(*names, cls=GroupedOption, group=group, **attributes)


def config_options(
    config: type[Any], *, without: Collection[str] = (), only: Collection[str] | None = None
) -> Callable[[F], F]:
    """Return a decorator that adds an option for each field of the dataclass with a help text.

    `only` restricts it to the fields named there; otherwise `without` names fields to leave out.
    """
    hints = typing.get_type_hints(config)

    def add(command: F) -> F:
        for field in reversed(dataclasses.fields(config)):
            wanted = field.name not in without if only is None else field.name in only
            if "help" in field.metadata and wanted:
                command = _option(field, hints[field.name])(command)
        return command

    return add


def given(config: type[Any], values: dict[str, Any]) -> dict[str, Any]:
    """Return those of `values` that are fields of `config` and differ from the defaults."""
    return {
        field.name: values[field.name]
        for field in dataclasses.fields(config)
        if field.name in values and values[field.name] != field.default
    }


def read_ca(file: str) -> ssl.SSLContext | None:
    """Return the TLS context for the value of `--ca`; `None` if it is empty.

    Raises `BadParameter`.
    """
    try:
        return client_context(file)
    except BadRequest as error:
        raise click.BadParameter(error.message, param_hint="--ca") from None


def read_params(pairs: Collection[str]) -> dict[str, Any]:
    """Parse `K=V` pairs. A V that is valid JSON is parsed as such; any other V is a string.

    Raises `BadParameter` for a pair of another form.
    """
    params = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise click.BadParameter(f"{pair!r} is not of the form K=V", param_hint="--param")
        try:
            params[name] = json.loads(value)
        except ValueError:
            params[name] = value
    return params


def _option(field: dataclasses.Field[Any], hint: Any) -> Callable[[F], F]:
    name = "--" + field.name.replace("_", "-")
    names = [name, field.name]
    if name.endswith("-s"):  # the unit may be left out: --stall for --stall-s
        names.insert(0, name.removesuffix("-s"))
    attributes: dict[str, Any] = {
        "default": field.default,
        "help": field.metadata["help"],
        "group": field.metadata.get("group", OTHERS),
    }
    if hint is bool:
        return option(name, is_flag=True, **attributes)
    kind: Any = hint
    if typing.get_origin(hint) is Literal:
        kind = click.Choice(typing.get_args(hint))
    elif hint in (int, float):
        kind = Number(hint, field.metadata.get("least"), field.metadata.get("most"))
    return option(*names, type=kind, show_default=field.default != "", **attributes)


def split_flags(option: str, text: str) -> tuple[str, ...]:
    """Return the arguments that a text has, as a shell would. Raises `click.UsageError`."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise click.UsageError(f"{option} {text!r}: {error}") from None


def with_vllm_flags(flags: dict[str, Any], extra: tuple[str, ...]) -> dict[str, Any]:
    """Return an engine's flags with the arguments behind a lone `--`, which vLLM gets.

    Raises `click.UsageError` if another engine would get them.
    """
    if (extra or flags["vllm_args"]) and flags["backend"] != "vllm":
        raise click.UsageError("arguments for vLLM need --backend vllm")
    given = f"{flags['vllm_args']} {shlex.join(extra)}".strip()
    return {**flags, "vllm_args": given}
