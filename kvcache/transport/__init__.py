"""Transports: one small protocol, one implementation for each kind of memory."""

import logging

import torch

from kvcache.errors import BadRequest
from kvcache.lease import Put
from kvcache.memory import USUAL_BYTES, CudaDevice
from kvcache.transport.auto import AutoTransport
from kvcache.transport.base import Transport
from kvcache.transport.cuda_ipc import CudaIpcTransport
from kvcache.transport.endpoint import strip_scheme
from kvcache.transport.handshake import accept_handshake, enable_keepalive, send_handshake
from kvcache.transport.memory import MemoryNetwork, MemoryTransport
from kvcache.transport.network import ANY_PORT, LOOPBACK, Network, Verify, listen
from kvcache.transport.nixl.agent import has_nixl
from kvcache.transport.nixl.transport import NixlTransport
from kvcache.transport.shm import ShmTransport

log = logging.getLogger(__name__)

CPU = torch.device("cpu")


def make_transport(
    name: str,
    epoch: int,
    *,
    secret: bytes,
    network: Network = LOOPBACK,
    prefault_bytes: int = USUAL_BYTES,
    device: torch.device = CPU,
) -> Transport:
    """Return an engine's transport by name, for a pool on `device`.

    `auto` is shared memory within this host, and NIXL beyond it if `network` leads there and NIXL
    is installed. `prefault_bytes` as of `ShmTransport`. For a pool on a GPU it is CUDA IPC.

    Raises: `BadRequest` if the transport is unknown or not installed, if it does not reach pools on
    this device, or if peers cannot reach the address.
    """
    if device.type == "cuda":
        if name not in ("auto", "cuda_ipc"):
            message = f"pools in GPU memory are reached by cuda_ipc, not by {name}"
            raise BadRequest(message, param="transport")
        return CudaIpcTransport(epoch, CudaDevice(device))
    if name == "auto":
        name = "shm"
        if network.reaches_out:
            if has_nixl():
                return AutoTransport(
                    epoch, secret=secret, network=network, prefault_bytes=prefault_bytes
                )
            log.warning("KV moves within this host only: NIXL is not installed (extra nixl)")
    match name:
        case "cuda_ipc":
            message = "cuda_ipc reaches pools in GPU memory alone (--device cuda)"
            raise BadRequest(message, param="transport")
        case "shm":
            return ShmTransport(epoch, prefault_bytes=prefault_bytes)
        case "nixl":
            return NixlTransport(epoch, secret=secret, network=network)
    raise BadRequest(f"there is no transport {name}", param="transport")


__all__ = [
    "ANY_PORT",
    "AutoTransport",
    "CudaIpcTransport",
    "MemoryNetwork",
    "MemoryTransport",
    "Network",
    "NixlTransport",
    "Put",
    "ShmTransport",
    "Transport",
    "Verify",
    "accept_handshake",
    "enable_keepalive",
    "listen",
    "make_transport",
    "send_handshake",
    "strip_scheme",
]
