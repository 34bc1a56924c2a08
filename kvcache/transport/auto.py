"""The `auto` transport: shared memory within a host, NIXL between hosts, chosen for each peer."""

from __future__ import annotations

from kvcache.lease import KVAddress, Put
from kvcache.memory import USUAL_BYTES, FlaggedRegion, PoolLayout, Region
from kvcache.transport.endpoint import AutoEndpoint, host_id, parse_auto, strip_scheme
from kvcache.transport.network import Network
from kvcache.transport.nixl.transport import NixlTransport
from kvcache.transport.shm import ShmTransport

__all__ = ["AutoTransport"]


class AutoTransport:
    """A `Transport` whose one region both kinds of peers write.

    Write rights exclude peers of either kind (`kvcache.memory.FlaggedRegion`).
    """

    def __init__(
        self, epoch: int, *, secret: bytes, network: Network, prefault_bytes: int = USUAL_BYTES
    ) -> None:
        """As `ShmTransport` and `NixlTransport`, whose errors it raises."""
        self._far = NixlTransport(epoch, secret=secret, network=network)
        self._near = ShmTransport(epoch, region=FlaggedRegion, prefault_bytes=prefault_bytes)

    def allocate(self, layout: PoolLayout) -> FlaggedRegion:
        return self._far.allocate(layout)

    def register(self, region: Region) -> None:
        self._far.register(region)
        self._near.register(region)

    @property
    def region(self) -> FlaggedRegion:
        return self._far.region

    @property
    def endpoint(self) -> str:
        near = strip_scheme(self._near.endpoint, "shm")
        return str(AutoEndpoint(host_id(), near, strip_scheme(self._far.endpoint, "nixl")))

    def open(self, address: KVAddress, begin: int, join: int | None = None) -> Put:
        ways = parse_auto(address.endpoint)
        near = ways.is_here if ways is not None else address.endpoint.startswith("shm:")
        return (self._near if near else self._far).open(address, begin, join)

    def close(self) -> None:
        self._near.close()
        self._far.close()
