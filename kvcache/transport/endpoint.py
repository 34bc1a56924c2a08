"""Endpoints in addresses: `shm:PID:FD`, `nixl:HOST:PORT`, or both ways of one engine.

`auto:HOST_ID:PID:FD:HOST:PORT` is an engine that its own host reaches through shared memory and
others through a network. `HOST_ID` tells which host that is.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from kvcache.errors import PeerUnreachable

__all__ = ["AutoEndpoint", "host_id", "parse_auto", "strip_scheme"]


@dataclass(frozen=True, slots=True)
class AutoEndpoint:
    """The two ways to an engine's memory."""

    host_id: str
    near: str  # "PID:FD"
    far: str  # "HOST:PORT"

    def __str__(self) -> str:
        return f"auto:{self.host_id}:{self.near}:{self.far}"

    @property
    def is_here(self) -> bool:
        """Whether this process can map that memory."""
        return self.host_id == host_id()


def parse_auto(endpoint: str) -> AutoEndpoint | None:
    """Return the ways of an `auto` endpoint; None for one of another scheme.

    Raises `PeerUnreachable` if it is malformed.
    """
    if not endpoint.startswith("auto:"):
        return None
    fields = endpoint.split(":", 4)
    if len(fields) < 5:
        raise PeerUnreachable(f"{endpoint} is not a valid endpoint")
    return AutoEndpoint(fields[1], f"{fields[2]}:{fields[3]}", fields[4])


def strip_scheme(endpoint: str, name: str) -> str:
    """Return `endpoint` without the `name:` in front.

    Raises: `PeerUnreachable` if the endpoint belongs to another transport.
    """
    scheme, _, rest = endpoint.partition(":")
    if scheme != name:
        raise PeerUnreachable(f"the {name} transport cannot reach {endpoint}")
    return rest


@cache
def host_id() -> str:
    """Return what processes have in common that can map each other's memory.

    These are one kernel, one user and one PID namespace: containers have one each.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespace = os.stat("/proc/self/ns/pid").st_ino  # noqa: PTH116
    return hashlib.sha256(f"{boot} {namespace} {os.getuid()}".encode()).hexdigest()[:16]
