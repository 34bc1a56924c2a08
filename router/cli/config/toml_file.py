"""A TOML file with the line of each key.

tomllib reads the values and refuses what is no TOML, but tells no lines. `_Lines` finds them in
text that tomllib has accepted, so it needs to know only where keys and values begin and end.
"""

from __future__ import annotations

import re
import tomllib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from router.cli.config.problems import Invalid, Problem

__all__ = ["KeyPath", "TomlFile", "read_toml"]

KeyPath = tuple[str | int, ...]  # of a value: keys, and indices in arrays from 0
MOST = 1 << 20  # bytes of a file
PART = r"""(?:[A-Za-z0-9_-]+|"(?:[^"\\\n]|\\.)*"|'[^'\n]*')"""
KEY = re.compile(rf"{PART}(?:[ \t]*\.[ \t]*{PART})*")
STRING = re.compile(
    r'''"""(?:\\.|[^\\])*?"{3,5}|\'\'\'.*?'{3,5}|"(?:[^"\\\n]|\\.)*"|'[^'\n]*\'''', re.DOTALL
)
SCALAR = re.compile(r"[^,\]}#\n]*")
SPACE = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")


@dataclass(frozen=True)
class TomlFile:
    """The content of a file. `name` is the file as the user wrote it."""

    name: str
    folder: Path  # in which relative paths of the file are looked up
    data: dict[str, Any]
    lines: dict[KeyPath, int]

    def line(self, path: KeyPath) -> int:
        """Return the line of a key, or of the nearest table around it that has a line."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 1)


def read_toml(path: Path) -> TomlFile:
    """Read a file of at most 1 MiB. Raises `Invalid` with the line, where there is one."""
    name = str(path)
    try:
        with path.open("rb") as file:
            content = file.read(MOST + 1)
    except OSError as error:
        what = error.strerror or str(error)
        raise Invalid([Problem(name, 0, "", what, "name a TOML file that can be read")]) from None
    if len(content) > MOST:
        what, remedy = f"has more than {MOST} bytes", "a fleet needs a few kB: name its own file"
        raise Invalid([Problem(name, 0, "", what, remedy)])
    try:
        text = content.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise Invalid([Problem(name, line, "", "is not UTF-8", "save it as UTF-8")]) from None
    try:
        data = tomllib.loads(text)
        lines = _Lines(text).read()
    except tomllib.TOMLDecodeError as error:
        raise Invalid([_syntax(name, text, str(error))]) from None
    except ValueError as error:  # a number of thousands of digits
        what, remedy = str(error).partition(";")[0], "write a smaller number"
        raise Invalid([Problem(name, 1, "", what, remedy)]) from None
    except RecursionError:
        what, remedy = "is nested too deeply", "tables and lists here have few levels"
        raise Invalid([Problem(name, 1, "", what, remedy)]) from None
    return TomlFile(name, path.parent.resolve(), data, lines)


def _syntax(name: str, text: str, said: str) -> Problem:
    what, _, where = said.partition(" (at ")
    found = re.search(r"line (\d+)", where)
    line = int(found[1]) if found else max(1, len(text.splitlines()))
    rows = text.splitlines()
    key = KEY.match(rows[line - 1].lstrip(" \t[")) if 0 < line <= len(rows) else None
    remedy = "correct the TOML: text stands in quotes, and each key once"
    return Problem(name, line, key[0] if key else "", f"no TOML: {what}", remedy)


class _Lines:
    """Finds the lines of all keys, and of the elements of lists, in valid TOML."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._starts = [0, *(found.end() for found in re.finditer("\n", text))]
        self._found: dict[KeyPath, int] = {}
        self._tables: dict[KeyPath, int] = {}  # the number of elements of each array of tables

    def read(self) -> dict[KeyPath, int]:
        table: KeyPath = ()
        while self._skip():
            if self._text.startswith("[[", self._at):
                line = self._line()
                self._at += 2
                table = self._new_element(self._key(), line)
                self._at += 2
            elif self._text[self._at] == "[":
                line = self._line()
                self._at += 1
                table = self._inside((), self._key())
                self._header(table, line)
                self._at += 1
            else:
                self._pair(table)
        return self._found

    def _new_element(self, keys: Sequence[str], line: int) -> KeyPath:
        array = (*self._inside((), keys[:-1]), keys[-1])
        number = self._tables.get(array, 0)
        self._tables[array] = number + 1
        self._header((*array, number), line)
        return (*array, number)

    def _header(self, table: KeyPath, line: int) -> None:
        """Note the line of a table, and of those around it that have none of their own."""
        for end in range(1, len(table) + 1):
            self._found.setdefault(table[:end], line)

    def _inside(self, path: KeyPath, keys: Sequence[str]) -> KeyPath:
        """Return the path of a key; in an array of tables, that in its last element."""
        for key in keys:
            path = (*path, key)
            if path in self._tables:
                path = (*path, self._tables[path] - 1)
        return path

    def _pair(self, table: KeyPath) -> None:
        line = self._line()
        path = table
        for key in self._key():
            path = (*path, key)
            self._found.setdefault(path, line)
        self._skip()
        self._at += 1  # the "="
        self._value(path)

    def _value(self, path: KeyPath) -> None:
        self._skip()
        if string := STRING.match(self._text, self._at):
            self._at = string.end()
        elif self._text[self._at] == "[":
            self._at += 1
            number = 0
            while self._skip() and self._text[self._at] != "]":
                if self._text[self._at] == ",":
                    self._at += 1
                    continue
                self._found[*path, number] = self._line()
                self._value((*path, number))
                number += 1
            self._at += 1
        elif self._text[self._at] == "{":
            self._at += 1
            while self._skip() and self._text[self._at] != "}":
                if self._text[self._at] == ",":
                    self._at += 1
                    continue
                self._pair(path)
            self._at += 1
        elif scalar := SCALAR.match(self._text, self._at):
            self._at = scalar.end()

    def _key(self) -> list[str]:
        """Read a key, which may have dots and quotes, and return its parts."""
        self._skip()
        found = KEY.match(self._text, self._at)
        if found is None:  # tomllib has accepted a key here
            raise tomllib.TOMLDecodeError(f"no key (at line {self._line()}, column 1)")
        self._at = found.end()
        self._skip()
        inner: Any = tomllib.loads(f"{found[0]} = 0")
        parts = []
        while isinstance(inner, dict):
            ((part, inner),) = inner.items()
            parts.append(part)
        return parts

    def _skip(self) -> bool:
        """Pass over space and comments. Returns whether anything follows."""
        found = SPACE.match(self._text, self._at)
        self._at = found.end() if found else self._at
        return self._at < len(self._text)

    def _line(self) -> int:
        return bisect_right(self._starts, self._at)
