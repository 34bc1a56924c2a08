"""The environment twins of the flags: which variables they are, and what children receive."""

from __future__ import annotations

import os
import sys
from pathlib import Path

__all__ = ["PREFIX", "bare_environment", "child_environment", "drop_service_links", "hide_keys"]

PREFIX = "MICROSERVE"
COMMANDS = ("UP", "ENGINE", "ROUTER", "CHAT", "STRATEGY", "BENCH")
KEYS = ("--api-key", "--admin-key", "--engine-api-key")
# What Python and libraries need to run, and nothing that may be secret.
BARE = frozenset(
    {"HOME", "LANG", "LANGUAGE", "LD_LIBRARY_PATH", "PATH", "TMPDIR", "TZ", "VIRTUAL_ENV"}
)
BARE_PREFIXES = ("LC_", "PYTHON")


def drop_service_links() -> None:
    """Remove `MICROSERVE_ENGINE_PORT=tcp://…`: Kubernetes sets such names for its services."""
    for name, value in list(os.environ.items()):
        if name.startswith(f"{PREFIX}_") and value.startswith("tcp://"):
            del os.environ[name]


def child_environment() -> dict[str, str]:
    """Return the environment without the twins of flags: a child has flags of its own."""
    twins = tuple(f"{PREFIX}_{command}_" for command in COMMANDS)
    return {name: value for name, value in os.environ.items() if not name.startswith(twins)}


def bare_environment() -> dict[str, str]:
    """Return only the variables that Python needs, for a process that runs code of others."""
    return {
        name: value
        for name, value in os.environ.items()
        if name in BARE or name.startswith(BARE_PREFIXES)
    }


def hide_keys() -> None:
    """Restart this process with its keys in the environment, if they are among its arguments.

    Every user of the machine can read a process's arguments, only its owner its environment.
    """
    command, rest, keys = sys.argv[1:2], iter(sys.argv[2:]), {}
    shown = Path("/proc/self/cmdline").read_bytes().split(b"\0") if command else []
    arguments = []
    for argument in rest:
        name, equals, value = argument.partition("=")
        if name not in KEYS:
            arguments.append(argument)
            continue
        value = value if equals else next(rest, "")
        if argument.encode() not in shown:
            return  # called by a program with other arguments than the process's
        keys[f"{PREFIX}_{command[0]}_{name[2:]}".replace("-", "_").upper()] = value
    if keys:
        argv = [sys.executable, "-m", "router", *command, *arguments]
        os.execve(sys.executable, argv, {**os.environ, **keys})  # noqa: S606  no shell is wanted
