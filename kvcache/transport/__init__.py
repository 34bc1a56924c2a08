"""Transports: one small protocol, one implementation for each kind of memory."""

from kvcache.transport.base import Put, Transport
from kvcache.transport.memory import MemoryNetwork, MemoryTransport
from kvcache.transport.nixl import NixlTransport
from kvcache.transport.shm import ShmTransport

__all__ = ["MemoryNetwork", "MemoryTransport", "NixlTransport", "Put", "ShmTransport", "Transport"]
