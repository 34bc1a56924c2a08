"""The `shm` transport: CPU engines on one host. The sender maps the receiver's pool and writes."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from kvcache.errors import PeerUnreachable
from kvcache.lease import KVAddress, Put
from kvcache.memory import (
    USUAL_BYTES,
    FlaggedRegion,
    PoolLayout,
    Prefaulter,
    Region,
    SharedRegion,
    SplitLayout,
)
from kvcache.transport.base import Registered
from kvcache.transport.endpoint import parse_auto, strip_scheme
from kvcache.transport.mapped import MappedTarget
from kvcache.transport.put import QueuedPut
from kvcache.transport.worker import Worker

__all__ = ["ShmTransport"]


class ShmTransport:
    """A `Transport` over memfds."""

    def __init__(
        self,
        epoch: int,
        *,
        region: type[SharedRegion] = SharedRegion,
        prefault_bytes: int = USUAL_BYTES,
    ) -> None:
        """`region` is the class of the own memory.

        `prefault_bytes` of each pool, the own and those of peers, are populated in the background.
        """
        self._epoch, self._kind = epoch, region
        self._own = Registered(SharedRegion)
        # (pid, fd) -> (epoch, region). A put in flight keeps its own reference to the region.
        self._peers: dict[tuple[int, int], tuple[int, SharedRegion]] = {}
        self._peers_lock = threading.Lock()
        self._worker = Worker("put")
        self._prefaulter = Prefaulter(prefault_bytes)

    def allocate(self, layout: PoolLayout) -> SharedRegion:
        return self._kind.create(layout, self._epoch)

    def register(self, region: Region) -> None:
        own = self._own.set(region)
        if not isinstance(own.layout, SplitLayout):  # its workers do, each near itself
            self._prefaulter.add(own)

    @property
    def region(self) -> SharedRegion:
        return self._own.get()

    @property
    def endpoint(self) -> str:
        return f"shm:{os.getpid()}:{self.region.fd}"

    def open(self, address: KVAddress, begin: int, join: int | None = None) -> Put:
        target = MappedTarget(self.region, self._attach(address))
        put = QueuedPut(target, self.region.layout, address, self._worker, join)
        put.take_claim(begin)
        return put

    def close(self) -> None:
        self._worker.close()
        self._prefaulter.close()
        self._peers.clear()

    def _attach(self, address: KVAddress) -> SharedRegion:
        pid, fd, kind = _parse(address.endpoint)
        with self._peers_lock:
            for peer, (epoch, _) in list(self._peers.items()):
                # The mapping would keep the memory of a dead engine allocated.
                if not Path(f"/proc/{peer[0]}").exists() or (
                    peer == (pid, fd) and epoch != address.epoch
                ):
                    del self._peers[peer]
            if (pid, fd) not in self._peers:
                like = self.region.layout.of_peer(address.shards)
                region = kind.attach(pid, fd, address.epoch, like)
                self._peers[pid, fd] = address.epoch, region
                self._prefaulter.add(region)
            return self._peers[pid, fd][1]


def _parse(endpoint: str) -> tuple[int, int, type[SharedRegion]]:
    """Return process, descriptor and kind of a memory. Raises `PeerUnreachable`."""
    ways = parse_auto(endpoint)
    if ways is not None and not ways.is_here:
        raise PeerUnreachable(f"{endpoint} is on another host, or in another container")
    near = ways.near if ways is not None else strip_scheme(endpoint, "shm")
    pid, _, fd = near.partition(":")
    if not pid.isdecimal() or not fd.isdecimal():
        raise PeerUnreachable(f"{endpoint} is not a valid shm endpoint")
    return int(pid), int(fd), SharedRegion if ways is None else FlaggedRegion
