"""How a sender meets a receiver: a TCP connection on which each proves that it has the secret.

    receiver ──► epoch, challenge
    sender   ──► challenge, proof
    receiver ──► proof, NIXL metadata, where slots and pool lie, which flags are the sender's

One JSON document per frame, with its length before it. After that nothing is said: the connection
stays open as long as both live, and its end tells each of the other's.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
import struct
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Final

from kvcache.errors import PeerUnreachable, StaleEpoch

__all__ = ["Welcome", "greet", "is_over", "meet", "watch"]

HELLO_TIMEOUT_S = 5.0  # for each frame
MOST_BYTES: Final = 1 << 20  # of a frame
SILENCE_S: Final = (10, 5, 4)  # keep-alive: first probe, between probes, probes


@dataclass(frozen=True, slots=True)
class Welcome:
    """What a receiver tells a sender about its region."""

    metadata: str  # of the NIXL agent that is there for this sender alone; hex
    table: int  # address of the slots
    pool: int  # address of the pool
    pages: int  # KVLayout.pages
    party: int  # which flag of each slot is the sender's


def greet(connection: socket.socket, secret: bytes, epoch: int) -> Callable[[Welcome], None]:
    """The receiver's part; returns what sends the welcome. Raises `PeerUnreachable`."""
    challenge = secrets.token_hex(16)
    connection.settimeout(HELLO_TIMEOUT_S)
    _send(connection, {"epoch": epoch, "challenge": challenge})
    reply = _receive(connection)
    theirs = str(reply.get("challenge"))
    if not _is_proof(reply.get("proof"), secret, "sender", challenge, theirs):
        raise PeerUnreachable("a sender does not have this cluster's secret")

    def welcome(what: Welcome) -> None:
        body = json.dumps(asdict(what))
        proof = _proof(secret, "receiver", challenge, theirs, body)
        _send(connection, {"proof": proof, "body": body})

    return welcome


def meet(connection: socket.socket, secret: bytes, epoch: int) -> Welcome:
    """The sender's part. Raises `PeerUnreachable`, and `StaleEpoch` for another life of it."""
    connection.settimeout(HELLO_TIMEOUT_S)
    hello = _receive(connection)
    if hello.get("epoch") != epoch:
        raise StaleEpoch("the engine was restarted since the address was made")
    theirs, challenge = str(hello.get("challenge")), secrets.token_hex(16)
    _send(
        connection,
        {"challenge": challenge, "proof": _proof(secret, "sender", theirs, challenge)},
    )
    reply = _receive(connection)
    body = str(reply.get("body"))
    if not _is_proof(reply.get("proof"), secret, "receiver", theirs, challenge, body):
        raise PeerUnreachable("the receiver does not have this cluster's secret")
    try:
        return Welcome(**json.loads(body))
    except TypeError as error:
        raise PeerUnreachable("the receiver is of another version") from error


def watch(connection: socket.socket) -> None:
    """After the hello: wait for ever, but for the kernel to find that the peer's host has vanished;
    the connection fails then."""
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in zip(
        (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT), SILENCE_S, strict=True
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def is_over(connection: socket.socket) -> bool:
    """Whether the peer has ended; never waits."""
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _send(connection: socket.socket, fields: dict[str, Any]) -> None:
    body = json.dumps(fields).encode()
    try:
        connection.sendall(struct.pack(">I", len(body)) + body)
    except OSError as error:
        raise PeerUnreachable(f"the peer does not listen: {error}") from error


def _receive(connection: socket.socket) -> dict[str, Any]:
    (length,) = struct.unpack(">I", _exactly(connection, 4))
    if length > MOST_BYTES:
        raise PeerUnreachable("the peer speaks another language")
    try:
        fields = json.loads(_exactly(connection, length))
    except ValueError as error:
        raise PeerUnreachable("the peer speaks another language") from error
    if not isinstance(fields, dict):
        raise PeerUnreachable("the peer speaks another language")
    return fields


def _exactly(connection: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        try:
            part = connection.recv(length - len(data))
        except OSError as error:  # a timeout too
            raise PeerUnreachable(f"the peer does not answer: {error}") from error
        if not part:
            raise PeerUnreachable("the peer hung up")
        data += part
    return data


def _proof(secret: bytes, *what: str) -> str:
    return hmac.new(secret, "|".join(what).encode(), hashlib.sha256).hexdigest()


def _is_proof(proof: object, secret: bytes, *what: str) -> bool:
    return isinstance(proof, str) and hmac.compare_digest(proof, _proof(secret, *what))
