"""Fields of configurations that are command-line flags, of engines and of routers."""

from __future__ import annotations

from dataclasses import field
from typing import Any

__all__ = ["LONGEST_S", "count", "flag", "seconds", "secret"]

MOST = 2**40  # larger counts are mistakes
LONGEST_S = 1e7  # about 116 days


def flag(
    default: Any,
    group: str,
    help: str,
    *,
    least: float | None = None,
    most: float | None = None,
    rare: bool = False,
    path: bool = False,
) -> Any:
    """A field that is also a command-line flag, `--its-name`, listed in `group`.

    The command line refuses numbers below `least` and above `most`. Only `--help-all` lists a
    `rare` flag. The value of a `path` flag is the path of a file or a folder.
    """
    more = {"least": least, "most": most, "rare": rare, "path": path}
    return field(default=default, metadata={"help": help, "group": group, **more})


def count(
    default: int, group: str, help: str, *, least: int = 0, most: int = MOST, rare: bool = False
) -> Any:
    """A flag that is a number of things."""
    return flag(default, group, help, least=least, most=most, rare=rare)


def seconds(
    default: float, group: str, help: str, *, least: float = 0.001, rare: bool = False
) -> Any:
    """A flag that is a duration in seconds."""
    return flag(default, group, help, least=least, most=LONGEST_S, rare=rare)


def secret(group: str, help: str) -> Any:
    """A string flag that `repr` omits; an engine also reads it from its environment."""
    return field(default="", repr=False, metadata={"help": help, "group": group, "secret": True})
