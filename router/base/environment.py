"""What child processes receive: their command, their environment, and where they import from."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

__all__ = [
    "PREFIX",
    "bare_environment",
    "child_environment",
    "drop_service_links",
    "hide_keys",
    "import_from",
    "module_command",
]

PREFIX = "MICROSERVE"
COMMANDS = (
    "UP", "ENGINE", "ROUTER", "CHAT", "STRATEGY", "BENCH", "SIMULATE", "PROFILE", "TRAFFIC",
    "ADVISE", "STATUS", "SCALE", "DOWN",
)  # fmt: skip
KEYS = ("--api-key", "--admin-key", "--engine-api-key", "--openai-api-key", "--store")
# What Python and libraries need to run, and nothing that may be secret.
BARE = frozenset(
    {"HOME", "LANG", "LANGUAGE", "LD_LIBRARY_PATH", "PATH", "TMPDIR", "TZ", "VIRTUAL_ENV"}
)
BARE_PREFIXES = ("LC_", "PYTHON")
SOURCE = Path(__file__).parents[2]  # the folder that has this project's packages


def drop_service_links() -> None:
    """Remove `MICROSERVE_ENGINE_PORT=tcp://…`: Kubernetes sets such names for its services."""
    for name, value in list(os.environ.items()):
        if name.startswith(f"{PREFIX}_") and value.startswith("tcp://"):
            del os.environ[name]


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module of this project in another process.

    `-P` keeps the current folder out of the import path, where a file `engine.py` or `router.py`
    would be taken for the package. The process needs the environment of `child_environment`.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def child_environment() -> dict[str, str]:
    """Return the environment without the twins of flags: a child has flags of its own.

    The child imports the same packages as this process, from wherever that is.
    """
    twins = tuple(f"{PREFIX}_{command}_" for command in COMMANDS)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(twins)}
    return {**environment, **_python_path()}


def bare_environment() -> dict[str, str]:
    """Return only the variables that Python needs, for a process that runs code of others."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name in BARE or name.startswith(BARE_PREFIXES)
    }
    return {**environment, **_python_path()}


def _python_path() -> dict[str, str]:
    """Return the `PYTHONPATH` of a child, unless it finds the installed packages without it."""
    if str(SOURCE) in {sysconfig.get_path(name) for name in ("purelib", "platlib")}:
        return {}
    given = os.environ.get("PYTHONPATH", "")
    path = [str(SOURCE), *(part for part in given.split(os.pathsep) if part != str(SOURCE))]
    return {"PYTHONPATH": os.pathsep.join(path if given else path[:1])}


def import_from(folder: Path) -> None:
    """Let the modules in `folder` be imported where no other module has their name. Idempotent."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


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
        reads = "up" if command == ["config"] else command[0]  # `config show` has the flags of `up`
        keys[f"{PREFIX}_{reads}_{name[2:]}".replace("-", "_").upper()] = value
    if keys:
        argv = module_command("router", *command, *arguments)
        os.execve(  # noqa: S606  no shell is wanted
            sys.executable, argv, {**os.environ, **_python_path(), **keys}
        )
