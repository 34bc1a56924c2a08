"""The handshake of sender and receiver: over a socket, each side proves that it has the secret.

    receiver ──► epoch, challenge
    sender   ──► challenge, what it says of itself, proof
    receiver ──► what it says of itself, proof

Each frame is one JSON document behind its length. A proof covers both challenges, the purpose of
the connection and what its side says. Frames that follow the handshake are not covered.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
import struct
import time
from collections.abc import Callable
from typing import Any, Final

from kvcache.errors import PeerUnreachable, StaleEpoch

__all__ = ["accept_handshake", "enable_keepalive", "is_closed", "send_handshake"]

HANDSHAKE_TIMEOUT_S = 5.0  # for each frame
MAX_FRAME_BYTES: Final = 1 << 20
KEEPALIVE: Final = (10, 5, 4)  # seconds to the first probe, seconds between probes, probes


def accept_handshake(
    connection: socket.socket, secret: bytes, epoch: int, *, purpose: str = ""
) -> tuple[str, Callable[[str], None]]:
    """Run the receiver's side. Return what the sender says, and a function that sends the answer.

    Both sides have to name the same `purpose`, so that no proof serves for another protocol.
    Raises: `PeerUnreachable` if the sender does not answer or does not have the secret.
    """
    challenge = secrets.token_hex(16)
    _send(connection, {"epoch": epoch, "challenge": challenge})
    reply = _receive(connection)
    theirs, said = _challenge_of(reply), str(reply.get("body", ""))
    if not _is_proof(reply.get("proof"), secret, f"{purpose}sender", challenge, theirs, said):
        raise PeerUnreachable("a sender does not have this cluster's secret")

    def finish(body: str) -> None:
        proof = _proof(secret, f"{purpose}receiver", challenge, theirs, body)
        _send(connection, {"proof": proof.decode(), "body": body})

    return said, finish


def send_handshake(
    connection: socket.socket, secret: bytes, epoch: int, body: str = "", *, purpose: str = ""
) -> str:
    """Run the sender's side: say `body`, and return what the receiver says.

    Raises: `PeerUnreachable` if the receiver does not answer or does not have the secret;
    `StaleEpoch` if the engine at the address has restarted.
    """
    opening = _receive(connection)
    if opening.get("epoch") != epoch:
        raise StaleEpoch("the engine was restarted since the address was made")
    theirs, challenge = _challenge_of(opening), secrets.token_hex(16)
    proof = _proof(secret, f"{purpose}sender", theirs, challenge, body)
    _send(connection, {"challenge": challenge, "body": body, "proof": proof.decode()})
    reply = _receive(connection)
    said = str(reply.get("body"))
    if not _is_proof(reply.get("proof"), secret, f"{purpose}receiver", theirs, challenge, said):
        raise PeerUnreachable("the receiver does not have this cluster's secret")
    return said


def enable_keepalive(connection: socket.socket) -> None:
    """Remove the timeout after the handshake, and let TCP keep-alive detect a vanished host.

    The connection then fails.
    """
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in zip(
        (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT), KEEPALIVE, strict=True
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def is_closed(connection: socket.socket) -> bool:
    """Return whether the peer has closed the connection or it has failed; never block."""
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _send(connection: socket.socket, fields: dict[str, Any]) -> None:
    body = json.dumps(fields).encode()
    try:
        connection.settimeout(HANDSHAKE_TIMEOUT_S)
        connection.sendall(struct.pack(">I", len(body)) + body)
    except OSError as error:
        raise PeerUnreachable(f"the peer cannot be sent to: {error}") from error


def _receive(connection: socket.socket) -> dict[str, Any]:
    deadline = time.monotonic() + HANDSHAKE_TIMEOUT_S
    (length,) = struct.unpack(">I", _exactly(connection, 4, deadline))
    if length > MAX_FRAME_BYTES:
        raise PeerUnreachable("the peer does not speak this protocol")
    body = _exactly(connection, length, deadline)
    connection.settimeout(HANDSHAKE_TIMEOUT_S)
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise PeerUnreachable("the peer does not speak this protocol") from error
    if not isinstance(fields, dict):
        raise PeerUnreachable("the peer does not speak this protocol")
    return fields


def _challenge_of(fields: dict[str, Any]) -> str:
    """Return the other side's challenge, which cannot be taken for another field of a proof."""
    challenge = fields.get("challenge")
    if not isinstance(challenge, str) or not challenge.isalnum():
        raise PeerUnreachable("the peer does not speak this protocol")
    return challenge


def _exactly(connection: socket.socket, length: int, deadline: float) -> bytes:
    data = bytearray()
    while len(data) < length:
        left = deadline - time.monotonic()
        try:
            if left <= 0:
                raise TimeoutError("timed out")
            connection.settimeout(left)
            part = connection.recv(length - len(data))
        except OSError as error:  # includes timeouts
            raise PeerUnreachable(f"the peer does not answer: {error}") from error
        if not part:
            raise PeerUnreachable("the peer closed the connection")
        data += part
    return bytes(data)


def _proof(secret: bytes, *fields: str) -> bytes:
    # JSON can name lone surrogates, which UTF-8 cannot encode.
    said = "|".join(fields).encode(errors="surrogatepass")
    return hmac.new(secret, said, hashlib.sha256).hexdigest().encode()


def _is_proof(proof: object, secret: bytes, *fields: str) -> bool:
    if not isinstance(proof, str) or not proof.isascii():
        return False
    return hmac.compare_digest(proof.encode(), _proof(secret, *fields))
