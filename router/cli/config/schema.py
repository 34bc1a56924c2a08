"""What a fleet's file may say: every table and key, taken from the options of the commands.

There is no list of keys. `[router]` and `[keys]` have the options of `microserve router`,
`[engine]` those of `microserve engine`, and the top those that only `microserve up` has.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from router.cli.config.problems import nearest
from router.cli.options import GroupedOption, ModelName, Number, StrategyName
from router.cli.serve import engine, router

__all__ = ["ENGINE_OWN", "KEYS_FILE", "Refused", "Schema", "Setting"]

# Engine flags that `up` does not offer: it sets them itself, or the name means the router's flag.
ENGINE_OWN = (
    "host", "port", "role", "router", "router_ca", "advertise", "labels", "engine_id", "api_key",
    "admin_key", "allowed_hosts", "max_connections", "tls_cert", "tls_key", "client_ca",
    "parent_pid", "memory_share",
)  # fmt: skip
ROUTER_OWN = ("engines", "params", "parent_pid")  # those of the router; params are a table
UP_OWN = ("config", "params")  # options of `up` that are no settings
KEYS_FILE = "api_key_file"  # `file` in the table [keys]


class Refused(Exception):
    """A value that a setting does not take."""

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy


@dataclass(frozen=True)
class Setting:
    """One key of a table: an option, or an argument, of a command."""

    param: click.Parameter

    @property
    def name(self) -> str:
        return self.param.name or ""

    @property
    def names(self) -> list[str]:
        """The names that a file may use, with `_`."""
        long = (name[2:].replace("-", "_") for name in self.param.opts if name.startswith("--"))
        return list(dict.fromkeys((self.name, *long)))

    @property
    def default(self) -> Any:
        if self.param.nargs == -1:
            return ()
        return self.param.default if isinstance(self.param.default, _PLAIN) else None

    @property
    def secret(self) -> bool:
        return isinstance(self.param, GroupedOption) and self.param.secret

    def read(self, value: Any, folder: Path) -> Any:
        """Return the value of a file. Relative paths begin in `folder`. Raises `Refused`."""
        kind = self.param.type
        if self.param.nargs == -1:
            return self._read_list(value)
        if isinstance(self.param, click.Option) and self.param.is_flag:
            _expect(value, bool, "true or false, without quotes")
            return value
        if isinstance(kind, Number):
            return _number(value, kind)
        if isinstance(kind, click.Choice):
            _expect(value, str, f"one of: {', '.join(kind.choices)}")
            if value not in kind.choices:
                raise Refused(f"{_shown(value)} is unknown", nearest(value, list(kind.choices)))
            return value
        _expect(value, str, "a text in quotes")
        if not value.isprintable():
            raise Refused("has characters that cannot be printed", "write it in one line")
        if isinstance(kind, click.Path):
            return str(folder / value) if value else value
        if isinstance(kind, StrategyName):
            return str(folder / value) if value.endswith(".py") else value
        if isinstance(kind, ModelName):
            named = value.startswith(("./", "../")) or value.endswith(".gguf")
            return str(folder / value) if named else value
        return value

    def _read_list(self, value: Any) -> tuple[str, ...]:
        remedy = 'a list of texts, such as ["--max-num-seqs", "8"]'
        _expect(value, list, remedy)
        for one in value:
            _expect(one, str, remedy)
            if "\0" in one:
                raise Refused("has a null character", "drop it")
        return tuple(value)


@dataclass(frozen=True)
class Schema:
    """The settings of each table, by their names."""

    top: Mapping[str, Setting]
    router: Mapping[str, Setting]
    keys: Mapping[str, Setting]
    engine: Mapping[str, Setting]
    role: Setting  # of a pool

    @classmethod
    def of(cls, up: click.Command) -> Schema:
        """Return the schema of a file for the command `up`."""
        of_router = _settings(router, ROUTER_OWN)
        of_engine = _settings(engine, (*ENGINE_OWN, "model"))
        keys = {n: one for n, one in of_router.items() if one.secret or n == KEYS_FILE}
        top = _settings(up, UP_OWN)
        role = Setting(next(one for one in engine.params if one.name == "role"))
        return cls(
            top={n: one for n, one in top.items() if n not in {**of_router, **of_engine}},
            router={n: one for n, one in of_router.items() if n not in keys},
            keys=keys,
            engine=of_engine,
            role=role,
        )

    def table_of(self, name: str) -> str:
        """Return where a setting belongs, such as `[router]`; empty if there is none."""
        tables = {"[router]": self.router, "[engine]": self.engine, "[keys]": self.keys}
        for table, settings in {**tables, "the top": self.top}.items():
            if name in settings:
                return table
        return ""


def _settings(command: click.Command, without: tuple[str, ...]) -> dict[str, Setting]:
    return {
        one.name: Setting(one) for one in command.params if one.name and one.name not in without
    }


_PLAIN = (str, int, float, bool)
_NAMES = {str: "a text", bool: "true or false", int: "an integer", float: "a number",
          list: "a list", dict: "a table"}  # fmt: skip


def _number(value: Any, kind: Number) -> int | float:
    one = _NAMES[kind.kind]
    right = isinstance(value, int | float) and not isinstance(value, bool)
    if not right or (kind.kind is int and not isinstance(value, int)):
        raise Refused(f"must be {one}, not {_kind(value)}", f"{kind.bounds}, without quotes")
    remedy = f"choose a number {kind.bounds}" if kind.most < math.inf else f"choose {kind.bounds}"
    if value < kind.least:
        raise Refused(f"must be at least {kind.least:.12g}, not {_shown(value)}", remedy)
    if not value <= kind.most:
        raise Refused(f"must be at most {kind.most:.12g}, not {_shown(value)}", remedy)
    try:
        return kind.kind(value)
    except OverflowError:
        raise Refused("is too large for a number", remedy) from None


def _expect(value: Any, kind: type, remedy: str) -> None:
    if not isinstance(value, kind):
        raise Refused(f"must be {_NAMES[kind]}, not {_kind(value)}", f"write {remedy}")


def _kind(value: Any) -> str:
    return _NAMES.get(type(value), "a date or time")


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        return "a huge number"
    return text if len(text) <= 60 else f"{text[:57]}…"
