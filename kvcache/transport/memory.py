"""The `memory` transport: peers in one process, for tests and engines that share a process."""

from __future__ import annotations

from itertools import count

from kvcache.errors import PeerUnreachable, StaleEpoch
from kvcache.lease import KVAddress, Put
from kvcache.memory import LocalRegion, PoolLayout, Region
from kvcache.transport.base import Registered
from kvcache.transport.mapped import MappedTarget
from kvcache.transport.put import QueuedPut
from kvcache.transport.worker import Worker

__all__ = ["MemoryNetwork", "MemoryTransport"]


class MemoryNetwork:
    """A set of transports in one process that can reach each other."""

    def __init__(self) -> None:
        self.members: dict[str, MemoryTransport] = {}
        self._ids = count()

    def join(self, member: MemoryTransport) -> str:
        """Register a transport and return its endpoint."""
        endpoint = f"memory:{next(self._ids)}"
        self.members[endpoint] = member
        return endpoint


class MemoryTransport:
    """A `Transport` over private memory of this process."""

    def __init__(self, network: MemoryNetwork, epoch: int) -> None:
        self._own = Registered(LocalRegion)
        self.epoch = epoch
        self._network = network
        self._endpoint = network.join(self)
        self._worker = Worker("put")

    def allocate(self, layout: PoolLayout) -> LocalRegion:
        return LocalRegion(layout)

    def register(self, region: Region) -> None:
        self._own.set(region)

    @property
    def region(self) -> LocalRegion:
        return self._own.get()

    @property
    def endpoint(self) -> str:
        return self._endpoint

    def open(self, address: KVAddress, begin: int, join: int | None = None) -> Put:
        peer = self._network.members.get(address.endpoint)
        if peer is None:
            raise PeerUnreachable(f"no engine is reachable at {address.endpoint}")
        if peer.epoch != address.epoch:
            raise StaleEpoch("the engine was restarted since the address was made")
        target = MappedTarget(self.region, peer.region)
        put = QueuedPut(target, self.region.layout, address, self._worker, join)
        put.take_claim(begin)
        return put

    def close(self) -> None:
        self._network.members.pop(self._endpoint, None)
        self._worker.close()
