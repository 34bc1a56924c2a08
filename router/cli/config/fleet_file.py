"""The settings of a fleet's file: each value is read, checked by itself, and known by its line."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from router.cli.config.problems import Invalid, Problem, key_text, nearest
from router.cli.config.schema import KEYS_FILE, Refused, Schema, Setting
from router.cli.config.toml_file import KeyPath, TomlFile, read_toml

__all__ = ["FilePool", "FleetFile", "Value", "read_fleet_file"]

TABLES = ("router", "engine", "pool", "keys")
POOL = ("name", "role", "count", "labels", "engine")
MOST_ENGINES = 1024
MOST_PROBLEMS = 100
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
RESERVED = ("engine", "router")  # engines of pools without a name are called engine-0, …
LABEL = re.compile(r"[^\s=#,]+")
MOST_SECRET = 4096  # bytes of a file with a key
SHAPE = ("engines", "prefill", "decode", "prefill_flags", "decode_flags")


@dataclass(frozen=True, slots=True)
class Value:
    """A value of the file, with the path of its key."""

    value: Any
    path: KeyPath


@dataclass
class FilePool:
    """One `[[pool]]`. `engine` are the settings of its engines."""

    path: KeyPath
    name: str = ""
    role: str = "any"
    count: int = 1
    labels: dict[str, str] = field(default_factory=dict)
    engine: dict[str, Value] = field(default_factory=dict)


@dataclass
class FleetFile:
    """The values of a file by the tables of `Schema`."""

    toml: TomlFile
    top: dict[str, Value] = field(default_factory=dict)
    router: dict[str, Value] = field(default_factory=dict)
    params: dict[str, Value] = field(default_factory=dict)
    keys: dict[str, Value] = field(default_factory=dict)
    engine: dict[str, Value] = field(default_factory=dict)
    pools: list[FilePool] = field(default_factory=list)

    def where(self, path: KeyPath) -> str:
        """Return `FILE:LINE` of a key."""
        return f"{self.toml.name}:{self.toml.line(path)}"

    def problem(self, path: KeyPath, message: str, remedy: str) -> Problem:
        """Return a problem of the value at `path`."""
        return Problem(self.toml.name, self.toml.line(path), key_text(path), message, remedy)


def read_fleet_file(path: Path, schema: Schema) -> FleetFile:
    """Read a file. Raises `Invalid` with all problems that values have by themselves."""
    reader = _Reader(FleetFile(read_toml(path)), schema)
    reader.read()
    if reader.problems:
        raise Invalid(reader.problems)
    return reader.file


class _Reader:
    def __init__(self, file: FleetFile, schema: Schema) -> None:
        self.file = file
        self.problems: list[Problem] = []
        self._schema = schema
        self._folder = file.toml.folder

    def read(self) -> None:
        file, schema, data = self.file, self._schema, self.file.toml.data
        tables = {name: data[name] for name in TABLES if name in data}
        plain = {name: value for name, value in data.items() if name not in TABLES}
        file.top = self._settings((), plain, schema.top, TABLES)
        router = dict(self._table(("router",), tables.get("router", {})))
        params = self._table(("router", "params"), router.pop("params", {}))
        file.params = {n: Value(v, ("router", "params", n)) for n, v in params.items()}
        for param in file.params.values():
            try:
                json.dumps(param.value)
            except TypeError:
                remedy = "write a number, a text, true, false, or a list or table of these"
                self._wrong(param.path, "a date or time is no parameter", remedy)
            except ValueError:
                self._wrong(param.path, "is too large for a number", "write a smaller one")
        file.router = self._settings(("router",), router, schema.router, ("params",))
        file.engine = self._settings(("engine",), tables.get("engine", {}), schema.engine)
        file.keys = self._keys(self._table(("keys",), tables.get("keys", {})))
        self._pools(tables.get("pool", []))

    def _wrong(self, path: KeyPath, message: str, remedy: str) -> None:
        self.problems.append(self.file.problem(path, message, remedy))
        if len(self.problems) == MOST_PROBLEMS:
            what = "nothing was checked after the mistakes up to here"
            self.problems.append(self.file.problem(path, what, "correct these first"))
            raise Invalid(self.problems)

    def _table(self, path: KeyPath, value: Any) -> Mapping[str, Any]:
        if isinstance(value, dict):
            return value
        header = f"[{key_text(path)}]" if isinstance(path[-1], str) else f"[[{path[-2]}]]"
        self._wrong(path, "must be a table", f"write {header}, and its keys below")
        return {}

    def _settings(
        self,
        table: KeyPath,
        values: Any,
        settings: Mapping[str, Setting],
        others: Collection[str] = (),
    ) -> dict[str, Value]:
        """Read the settings of one table; `others` are further names in it, for messages."""
        by_name = {name: one for one in settings.values() for name in one.names}
        found: dict[str, Value] = {}
        for written, value in self._table(table, values).items():
            path = (*table, written)
            setting = by_name.get(written.replace("-", "_"))
            if setting is None:
                self._unknown(path, [*settings, *others])
            elif setting.name in found:
                first = self.file.where(found[setting.name].path)
                self._wrong(path, f"is also set at {first}", "keep one of the two")
            else:
                try:
                    found[setting.name] = Value(setting.read(value, self._folder), path)
                except Refused as error:
                    self._wrong(path, error.message, error.remedy)
        return found

    def _unknown(self, path: KeyPath, known: Collection[str]) -> None:
        name = str(path[-1]).replace("-", "_")
        table = self._schema.table_of(name) or ("[[pool]]" if name in POOL else "")
        if table:
            self._wrong(path, "unknown key here", f"it belongs in {table}")
        else:
            self._wrong(path, "unknown key", nearest(name, known))

    def _keys(self, values: Mapping[str, Any]) -> dict[str, Value]:
        """Read keys, each a text, `{env = "NAME"}` or `{file = "PATH"}`."""
        plain, found = {}, {}
        for written, value in values.items():
            name = KEYS_FILE if written == "file" else written.replace("-", "_")
            path: KeyPath = ("keys", written)
            setting = self._schema.keys.get(name)
            if setting is None:
                self._unknown(path, ["file", *(n for n in self._schema.keys if n != KEYS_FILE)])
            elif setting.secret and isinstance(value, dict):
                if (secret := self._secret(path, value)) is not None:
                    plain[name] = Value(secret, path)
            else:
                try:
                    plain[name] = Value(setting.read(value, self._folder), path)
                except Refused as error:
                    self._wrong(path, error.message, error.remedy)
        found.update(plain)
        return found

    def _secret(self, path: KeyPath, value: dict[str, Any]) -> str | None:
        remedy = 'write "KEY", {env = "NAME"} or {file = "PATH"}'
        if len(value) != 1 or not all(isinstance(one, str) for one in value.values()):
            self._wrong(path, "is no key", remedy)
            return None
        source, name = next((source, str(name)) for source, name in value.items())
        if source == "env":
            if name not in os.environ:
                self._wrong(path, f"the variable {name!r} is not set", "export it")
            return os.environ.get(name)
        if source != "file":
            self._wrong(path, f"{source!r} is no source of a key", remedy)
            return None
        try:
            with (self._folder / name).open("rb") as file:
                content = file.read(MOST_SECRET + 1).decode().strip()
        except (OSError, ValueError) as error:
            what = getattr(error, "strerror", None) or "no text in UTF-8"
            self._wrong(path, f"{name}: {what}", "name a file that has only the key")
            return None
        if not content or len(content) > MOST_SECRET or not content.isprintable():
            self._wrong(path, f"{name}: is no key", "the file has only the key, in one line")
            return None
        return content

    def _pools(self, pools: Any) -> None:
        if not isinstance(pools, list):
            self._wrong(("pool",), "must be a list of tables", "write [[pool]] with two brackets")
            return
        if pools and (shape := [name for name in SHAPE if name in self.file.top]):
            path = self.file.top[shape[0]].path
            self._wrong(path, "does not go with [[pool]]", "say it in a [[pool]], or drop these")
        for number, values in enumerate(pools):
            self._pool(("pool", number), values)
        names: dict[str, KeyPath] = {}
        for pool in self.file.pools:
            path = (*pool.path, "name")
            if pool.name in names:
                first = self.file.where(names[pool.name])
                self._wrong(path, f"{pool.name!r} is also the name at {first}", "rename one")
            elif pool.name:
                names[pool.name] = path

    def _pool(self, path: KeyPath, values: Any) -> None:
        pool = FilePool(path)
        rest = dict(self._table(path, values))
        pool.engine = self._settings((*path, "engine"), rest.pop("engine", {}), self._schema.engine)
        if "labels" in rest:
            pool.labels = self._labels((*path, "labels"), rest.pop("labels"))
        if "name" in rest:
            pool.name = self._name((*path, "name"), rest.pop("name"))
        if "role" in rest:
            try:
                pool.role = self._schema.role.read(rest.pop("role"), self._folder)
            except Refused as error:
                self._wrong((*path, "role"), error.message, error.remedy)
        if "count" in rest:
            count = rest.pop("count")
            right = isinstance(count, int) and not isinstance(count, bool)
            if right and 1 <= count <= MOST_ENGINES:
                pool.count = count
            else:
                remedy = f"choose from 1 to {MOST_ENGINES}, or drop the pool"
                self._wrong((*path, "count"), "must be a number of engines, at least 1", remedy)
        for name in rest:
            self._unknown((*path, name), POOL)
        self.file.pools.append(pool)

    def _name(self, path: KeyPath, name: Any) -> str:
        if isinstance(name, str) and NAME.fullmatch(name) and name not in RESERVED:
            return name
        remedy = f"letters, digits, '-', '_' and '.', and not {' or '.join(RESERVED)}"
        self._wrong(path, "is no name of a pool", remedy)
        return ""

    def _labels(self, path: KeyPath, values: Any) -> dict[str, str]:
        found = {}
        for name, value in self._table(path, values).items():
            good = isinstance(value, str) and LABEL.fullmatch(value) and LABEL.fullmatch(name)
            if good and name != "role" and f"{name}{value}".isprintable():
                found[name] = value
            else:
                remedy = "texts without spaces, '=', ',' and '#'; a role is not a label"
                self._wrong((*path, name), "is no label", remedy)
        return found
