"""`shm`: engines on one host, on CPUs. The sender maps the receiver's pool and writes into it."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path

from kvcache.errors import PeerUnreachable
from kvcache.lease.address import KVAddress
from kvcache.lease.put import Put
from kvcache.memory.layout import KVLayout
from kvcache.memory.prefault import Prefaulter
from kvcache.memory.region import SharedRegion
from kvcache.transport.base import after_scheme
from kvcache.transport.mapped import MappedTarget
from kvcache.transport.put import QueuedPut
from kvcache.transport.worker import Worker

__all__ = ["ShmTransport"]


class ShmTransport:
    """A `Transport` over memfds."""

    def __init__(self, layout: KVLayout, epoch: int) -> None:
        self._region = SharedRegion.create(layout, epoch)
        self.region = self._region
        # By endpoint, with the epoch. Puts under way keep what is let go here.
        self._peers: dict[tuple[int, int], tuple[int, SharedRegion]] = {}
        self._peers_lock = threading.Lock()
        self._worker = Worker("put")
        self._populator = Prefaulter()
        self._populator.add(self._region)

    @property
    def endpoint(self) -> str:
        return f"shm:{os.getpid()}:{self._region.fd}"

    def open(self, address: KVAddress, begin: int, join: int | None = None) -> Put:
        target = MappedTarget(self._region, self._attach(address))
        put = QueuedPut(target, self._region.layout, address, self._worker, join)
        put.take_claim(begin)
        return put

    def close(self) -> None:
        self._worker.close()
        self._populator.close()
        self._peers.clear()
        self._region.close()

    def _attach(self, address: KVAddress) -> SharedRegion:
        pid, fd = _parse(address.endpoint)
        with self._peers_lock:
            for peer, (epoch, _) in list(self._peers.items()):
                # A mapping would keep alive the memory of who is gone.
                if not Path(f"/proc/{peer[0]}").exists() or (
                    peer == (pid, fd) and epoch != address.epoch
                ):
                    del self._peers[peer]
            if (pid, fd) not in self._peers:
                like = replace(self._region.layout, shard=address.shard)
                region = SharedRegion.attach(pid, fd, address.epoch, like)
                self._peers[pid, fd] = address.epoch, region
                self._populator.add(region)
            return self._peers[pid, fd][1]


def _parse(endpoint: str) -> tuple[int, int]:
    pid, _, fd = after_scheme(endpoint, "shm").partition(":")
    if not pid.isdecimal() or not fd.isdecimal():
        raise PeerUnreachable(f"{endpoint} is no endpoint of shm")
    return int(pid), int(fd)
