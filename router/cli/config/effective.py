"""The configuration that is in force: defaults, the file, the environment and flags, in this order.

Each value is known with its source.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import click
from click.core import ParameterSource

from router.cli.config.fleet_file import FilePool, FleetFile, Value, read_fleet_file
from router.cli.config.schema import Schema, Setting
from router.cli.options import read_params

__all__ = ["Effective", "EffectivePool", "Entry", "effective", "read_effective"]

Layer = Literal["default", "file", "environment", "flag"]
DEFAULT_ENGINES = 2


@dataclass(frozen=True, slots=True)
class Entry:
    """A value in force. `source` names its layer for people; `in_file` is its place in the file."""

    value: Any
    layer: Layer
    source: str
    in_file: Value | None = None


@dataclass
class EffectivePool:
    """Engines that are alike. `engine` has all their settings."""

    count: int
    role: str
    layer: Layer
    source: str
    engine: dict[str, Entry]
    name: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    in_file: FilePool | None = None


@dataclass
class Effective:
    """All settings in force, by the tables of `Schema`."""

    schema: Schema
    file: FleetFile | None
    top: dict[str, Entry]
    router: dict[str, Entry]
    keys: dict[str, Entry]
    engine: dict[str, Entry]
    params: dict[str, Entry]
    pools: list[EffectivePool]


def read_effective(ctx: click.Context, up: click.Command) -> Effective:
    """Return what `up` runs with, given the values in `ctx.params`.

    `config` among them names the file. Raises `Invalid`, and `click.UsageError` for flags that
    exclude each other.
    """
    schema = Schema.of(up)
    path: Path | None = ctx.params.get("config")
    file = None if path is None else read_fleet_file(path, schema)
    return effective(schema, file, _flags(ctx))


def _flags(ctx: click.Context) -> dict[str, Entry]:
    """Return the options that were given, as flags or in the environment."""
    found: dict[str, Entry] = {}
    for name, value in ctx.params.items():
        source = ctx.get_parameter_source(name)
        if source is ParameterSource.COMMANDLINE:
            found[name] = Entry(value, "flag", "flag")
        elif source is ParameterSource.ENVIRONMENT:
            variable = f"{ctx.auto_envvar_prefix}_{name.upper()}"
            found[name] = Entry(value, "environment", f"environment {variable}")
    return found


def effective(
    schema: Schema, file: FleetFile | None, flags: Mapping[str, Entry] | None = None
) -> Effective:
    """Merge the layers. Raises `click.UsageError` for flags that exclude each other."""
    flags = flags or {}

    def merge(settings: Mapping[str, Setting], *layers: Mapping[str, Value]) -> dict[str, Entry]:
        values = {name: value for layer in layers for name, value in layer.items()}
        return {
            name: _entry(setting, values.get(name), flags.get(name), file)
            for name, setting in settings.items()
        }

    top = merge(schema.top, file.top if file else {})
    router = merge(schema.router, file.router if file else {})
    of_file = file.engine if file else {}
    pools = _pools(schema, file, top, flags)
    for pool in pools:
        own = pool.in_file.engine if pool.in_file else {}
        pool.engine = merge(schema.engine, of_file, own)
    return Effective(
        schema=schema,
        file=file,
        top=top,
        router=router,
        keys=merge(schema.keys, file.keys if file else {}),
        engine=merge(schema.engine, of_file),
        params=_params(file, router["strategy"], flags),
        pools=pools,
    )


def _entry(
    setting: Setting, value: Value | None, flag: Entry | None, file: FleetFile | None
) -> Entry:
    if flag is not None:
        return flag
    if value is not None and file is not None:
        return Entry(value.value, "file", file.where(value.path), value)
    return Entry(setting.default, "default", "default")


def _params(
    file: FleetFile | None, strategy: Entry, flags: Mapping[str, Entry]
) -> dict[str, Entry]:
    """Return the strategy's parameters. Those of the file belong to the strategy of the file."""
    found: dict[str, Entry] = {}
    named = file.router.get("strategy") if file else None
    if file and (
        strategy.layer in ("file", "default") or (named and named.value == strategy.value)
    ):
        for name, value in file.params.items():
            found[name] = Entry(value.value, "file", file.where(value.path), value)
    if pairs := flags.get("params"):
        for name, value in read_params(pairs.value).items():
            found[name] = Entry(value, pairs.layer, pairs.source)
    return found


def _pools(
    schema: Schema, file: FleetFile | None, top: dict[str, Entry], flags: Mapping[str, Entry]
) -> list[EffectivePool]:
    """Return the pools of the flags, else those of the file, else the default one."""
    chosen = [flags[name] for name in ("engines", "prefill", "decode") if name in flags]
    if chosen:  # they replace all of the file's, whose flags of a role go with them
        for name in ("engines", "prefill", "decode", "prefill_flags", "decode_flags"):
            if top[name].layer == "file":
                top[name] = Entry(schema.top[name].default, "default", "default")
    elif file and file.pools:
        return [
            EffectivePool(
                count=one.count,
                role=one.role,
                layer="file",
                source=file.where(one.path),
                engine={},
                name=one.name,
                labels=one.labels,
                in_file=one,
            )
            for one in file.pools
        ]
    engines, prefill, decode = (top[name] for name in ("engines", "prefill", "decode"))
    if engines.value is not None and (prefill.value or decode.value):
        if engines.in_file is None or file is None:
            raise click.UsageError("use either --engines, or --prefill and --decode")
        return []  # a problem of the file, which the checks report
    found = [
        EffectivePool(entry.value, role, entry.layer, entry.source, {})
        for role, entry in (("prefill", prefill), ("decode", decode))
        if entry.value
    ]
    if found:
        return found
    return [
        EffectivePool(engines.value or DEFAULT_ENGINES, "any", engines.layer, engines.source, {})
    ]
