"""The environment twins of our flags: which variables are ours, and what children are given."""

from __future__ import annotations

import os

__all__ = ["PREFIX", "child_environment", "drop_service_links"]

PREFIX = "MICROSERVE"
COMMANDS = ("UP", "ENGINE", "ROUTER", "CHAT", "STRATEGY")


def drop_service_links() -> None:
    """Forget `MICROSERVE_ENGINE_PORT=tcp://…`: Kubernetes sets such names for its services."""
    for name, value in list(os.environ.items()):
        if name.startswith(f"{PREFIX}_") and value.startswith("tcp://"):
            del os.environ[name]


def child_environment() -> dict[str, str]:
    """Our environment without the twins of flags: a child has flags of its own."""
    twins = tuple(f"{PREFIX}_{command}_" for command in COMMANDS)
    return {name: value for name, value in os.environ.items() if not name.startswith(twins)}
