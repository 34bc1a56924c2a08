"""Command-line options made of the fields of a config: one place for names, defaults, help."""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Callable, Collection
from typing import Any, Literal, TypeVar

import click

__all__ = ["config_options", "given", "read_params"]

F = TypeVar("F", bound=Callable[..., Any])


def config_options(
    config: type[Any], *, without: Collection[str] = (), only: Collection[str] | None = None
) -> Callable[[F], F]:
    """A decorator that adds an option for every field of the dataclass that has a help text, or for
    those of them that are named by `only`."""
    hints = typing.get_type_hints(config)

    def add(command: F) -> F:
        for field in reversed(dataclasses.fields(config)):
            wanted = field.name not in without if only is None else field.name in only
            if "help" in field.metadata and wanted:
                command = _option(field, hints[field.name])(command)
        return command

    return add


def given(config: type[Any], values: dict[str, Any]) -> dict[str, Any]:
    """Those of `values` that are fields of `config` and not its defaults."""
    return {
        field.name: values[field.name]
        for field in dataclasses.fields(config)
        if field.name in values and values[field.name] != field.default
    }


def read_params(pairs: Collection[str]) -> dict[str, Any]:
    """`K=V` pairs as params; a V that is JSON is what it says, any other is a string."""
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
    if name.endswith("-s"):  # seconds: what is typed need not say so
        names.insert(0, name.removesuffix("-s"))
    kind: Any = hint
    if hint is bool:
        return click.option(name, is_flag=True, default=field.default, help=field.metadata["help"])
    if typing.get_origin(hint) is Literal:
        kind = click.Choice(typing.get_args(hint))
    return click.option(
        *names,
        type=kind,
        default=field.default,
        show_default=field.default != "",
        help=field.metadata["help"],
    )
