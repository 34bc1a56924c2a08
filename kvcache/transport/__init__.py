"""Transports: one small protocol, one implementation for each kind of memory."""

from kvcache.errors import BadRequest
from kvcache.lease import Put
from kvcache.memory import USUAL_BYTES
from kvcache.transport.base import Transport, strip_scheme
from kvcache.transport.handshake import accept_handshake, enable_keepalive, send_handshake
from kvcache.transport.memory import MemoryNetwork, MemoryTransport
from kvcache.transport.nixl.transport import NixlTransport
from kvcache.transport.shm import ShmTransport


def make_transport(
    name: str, epoch: int, *, secret: bytes, host: str, prefault_bytes: int = USUAL_BYTES
) -> Transport:
    """Return an engine's transport by name; the name is also the scheme of its endpoints.

    `prefault_bytes` as of `ShmTransport`.

    Raises: `BadRequest` if the transport is unknown or not installed.
    """
    match name:
        case "shm":
            return ShmTransport(epoch, prefault_bytes=prefault_bytes)
        case "nixl":
            return NixlTransport(epoch, secret=secret, host=host)
    raise BadRequest(f"there is no transport {name}", param="transport")


__all__ = [
    "MemoryNetwork",
    "MemoryTransport",
    "NixlTransport",
    "Put",
    "ShmTransport",
    "Transport",
    "accept_handshake",
    "enable_keepalive",
    "make_transport",
    "send_handshake",
    "strip_scheme",
]
