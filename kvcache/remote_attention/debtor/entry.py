"""How a debtor connects to a creditor: the handshake, and the buffers of the connection."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict

from kvcache.errors import BadRequest, PeerUnreachable
from kvcache.lease import Identity
from kvcache.remote_attention.exchange import (
    PURPOSE,
    AttentionShape,
    Buffers,
    Limits,
    connect,
    said_fields,
)
from kvcache.transport import enable_keepalive, send_handshake

__all__ = ["descriptor", "enter"]


def enter(
    endpoint: str, epoch: int, identity: Identity, shape: AttentionShape, timeout_s: float
) -> tuple[socket.socket, Limits, Buffers]:
    """Connect to a creditor's process `epoch` as `identity`. Blocks for seconds.

    Raises `PeerUnreachable` if it does not answer or does not have the secret, `StaleEpoch` if it
    has been restarted, and `BadRequest` if its pages have another shape.
    """
    connection = connect(endpoint, timeout_s)
    try:
        hello = json.dumps({"engine_id": identity.engine_id, "epoch": identity.epoch})
        said = send_handshake(connection, identity.secret, epoch, hello, purpose=PURPOSE)
        fields = said_fields(said)
        if fields.get("shape") != asdict(shape):
            raise BadRequest(f"the creditor's pages are {fields.get('shape')}, not {asdict(shape)}")
        limits = Limits.of(fields.get("limits", {}))
        if connection.family == socket.AF_UNIX:
            buffers = Buffers.attach(shape, limits, descriptor(connection))
        else:
            buffers = Buffers(shape, limits)
            enable_keepalive(connection)
    except OSError as error:
        connection.close()
        raise PeerUnreachable(f"lost the connection to {endpoint}: {error}") from error
    except BaseException:
        connection.close()
        raise
    return connection, limits, buffers


def descriptor(connection: socket.socket) -> int:
    """Return the descriptor of memory that a creditor passes. Raises `PeerUnreachable` for none."""
    _, fds, _, _ = socket.recv_fds(connection, 1, 1)
    if len(fds) != 1:
        raise PeerUnreachable("the creditor has passed no memory")
    os.set_inheritable(fds[0], False)  # `recv_fds` passes no flags on
    return fds[0]
