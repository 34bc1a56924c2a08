"""Options made from the fields of a config: names, types, bounds, headings and help texts."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Collection
from typing import Any, Literal, TypeVar

import click

from router.cli.options.grouped import OTHERS, option
from router.cli.options.values import Number

__all__ = ["config_options", "given"]

F = TypeVar("F", bound=Callable[..., Any])
PASSED_ON = ("rare", "secret", "path")  # of a field's metadata to its option


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


def _option(field: dataclasses.Field[Any], hint: Any) -> Callable[[F], F]:
    name = "--" + field.name.replace("_", "-")
    names = [name, field.name]
    if name.endswith("-s"):  # the unit may be left out: --stall for --stall-s
        names.insert(0, name.removesuffix("-s"))
    attributes: dict[str, Any] = {
        "default": field.default,
        "help": field.metadata["help"],
        "group": field.metadata.get("group", OTHERS),
        **{name: field.metadata.get(name, False) for name in PASSED_ON},
    }
    if hint is bool:
        return option(name, is_flag=True, **attributes)
    kind: Any = hint
    if typing.get_origin(hint) is Literal:
        kind = click.Choice(typing.get_args(hint))
    elif hint in (int, float):
        kind = Number(hint, field.metadata.get("least"), field.metadata.get("most"))
    elif field.metadata.get("path"):
        kind = click.Path()
    return option(*names, type=kind, show_default=field.default != "", **attributes)
