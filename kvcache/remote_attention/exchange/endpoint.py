"""How debtors reach a creditor: a Unix socket within a host, TCP between hosts."""

from __future__ import annotations

import json
import secrets
import socket
from typing import Any, Final

from kvcache.errors import PeerUnreachable
from kvcache.transport import ANY_PORT, listen, strip_scheme

__all__ = ["PURPOSE", "connect", "listen_tcp", "listen_unix", "said_fields"]

PURPOSE: Final = "remote attention, "  # of a connection, for its handshake
BACKLOG: Final = 64


def listen_unix() -> tuple[socket.socket, str]:
    """Listen in the abstract namespace; return the socket and its endpoint, `unix:NAME`.

    The socket is in no file system, so a SIGKILL leaves nothing behind. Anybody on the host can
    connect, and needs the cluster's secret for the handshake. Raises `OSError`.
    """
    name = f"microserve-{secrets.token_hex(16)}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(f"\0{name}")
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener, f"unix:{name}"


def listen_tcp(host: str, ports: range = ANY_PORT) -> tuple[socket.socket, str]:
    """Listen at a free one of `ports`; return the socket and its endpoint, `tcp:HOST:PORT`.

    Raises `OSError`.
    """
    listener = listen(host, ports, backlog=BACKLOG)
    return listener, f"tcp:{host}:{listener.getsockname()[1]}"


def connect(endpoint: str, timeout_s: float) -> socket.socket:
    """Connect to a creditor. Raises `PeerUnreachable`."""
    try:
        if endpoint.startswith("unix:"):
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connection.settimeout(timeout_s)
                connection.connect(f"\0{strip_scheme(endpoint, 'unix')}")
            except BaseException:
                connection.close()
                raise
            return connection
        host, _, port = strip_scheme(endpoint, "tcp").rpartition(":")
        if not host or not port.isdecimal():
            raise PeerUnreachable(f"{endpoint} is not a valid endpoint")
        connection = socket.create_connection((host, int(port)), timeout_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except (OSError, OverflowError) as error:
        raise PeerUnreachable(f"cannot connect to {endpoint}: {error}") from error
    return connection


def said_fields(text: str) -> dict[str, Any]:
    """Return what the other side says in the handshake. Raises `PeerUnreachable` for no JSON."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise PeerUnreachable("the other side runs an incompatible version")
    return fields
