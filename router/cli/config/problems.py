"""What is wrong with a configuration: each problem has its file, line, key and remedy."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

__all__ = ["Invalid", "Problem", "key_text", "nearest"]


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """One mistake. `line` counts from 1, and 0 means the whole file; `key` may be empty then."""

    file: str
    line: int
    key: str
    message: str
    remedy: str

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.line else self.file
        key = f"{self.key}: " if self.key else ""
        return f"{where}: {key}{self.message} ({self.remedy})"


class Invalid(Exception):
    """A configuration with at least one problem."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = sorted(set(problems))
        super().__init__("\n".join(map(str, self.problems)))


def key_text(path: Sequence[str | int]) -> str:
    """Format the path of a key, such as `pool[1].engine.tp`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def nearest(name: str, known: Collection[str]) -> str:
    """Return a question with the known name that is most like `name`, or a list of all names."""
    if found := difflib.get_close_matches(name, known, 1, 0.6):
        return f"did you mean {found[0]!r}?"
    return f"one of: {', '.join(known)}"
