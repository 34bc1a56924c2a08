"""How a debtor is admitted: the handshake, and the buffers of its connection."""

from __future__ import annotations

import json
import socket
from dataclasses import asdict

from kvcache.errors import PeerUnreachable
from kvcache.lease import Identity
from kvcache.remote_attention.creditor.debtor_connection import DebtorConnection
from kvcache.remote_attention.creditor.loans import Debtor
from kvcache.remote_attention.exchange import PURPOSE, AttentionShape, Buffers, Limits, said_fields
from kvcache.transport import accept_handshake, enable_keepalive
from kvcache.types import EngineId

__all__ = ["admit"]


def admit(
    connection: socket.socket, identity: Identity, shape: AttentionShape, limits: Limits
) -> DebtorConnection:
    """Shake hands with a debtor, and pass it the buffers of its connection. Blocks for seconds.

    The handshake proves that it has the cluster's secret; all that have it are believed who they
    are. Raises `PeerUnreachable` or `OSError` if it does not answer or does not have the secret.
    """
    said, finish = accept_handshake(connection, identity.secret, identity.epoch, purpose=PURPOSE)
    fields = said_fields(said)
    engine_id, epoch = fields.get("engine_id"), fields.get("epoch")
    if not isinstance(engine_id, str) or type(epoch) is not int:
        raise PeerUnreachable("the debtor runs an incompatible version")
    shared = connection.family == socket.AF_UNIX
    buffers = Buffers.create(shape, limits) if shared else Buffers(shape, limits)
    try:
        finish(json.dumps({"shape": asdict(shape), "limits": asdict(limits)}))
        if shared:
            socket.send_fds(connection, [b"\0"], [buffers.fd])
        else:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            enable_keepalive(connection)
        debtor = Debtor(EngineId(engine_id), epoch)
        return DebtorConnection(connection, debtor, buffers, limits)
    except BaseException:
        buffers.close()
        raise
