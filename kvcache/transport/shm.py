"""`shm`: engines on one host, on CPUs. The sender maps the receiver's pool and writes into it."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvcache.address import KVAddress
from kvcache.errors import PeerUnreachable
from kvcache.layout import KVLayout
from kvcache.region import SharedRegion
from kvcache.transport.base import Put
from kvcache.transport.mapped import open_mapped
from kvcache.types import EngineId

__all__ = ["ShmTransport"]


class ShmTransport:
    """A `Transport` over memfds."""

    def __init__(self, layout: KVLayout, epoch: int) -> None:
        self._layout = layout
        self._region = SharedRegion.create(layout, epoch)
        self.region = self._region
        self._peers: dict[EngineId, tuple[int, int, SharedRegion]] = {}  # epoch, pid
        self._peers_lock = threading.Lock()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="put")

    @property
    def endpoint(self) -> str:
        return f"shm:{os.getpid()}:{self._region.fd}"

    def open(self, address: KVAddress, begin: int) -> Put:
        with self._peers_lock:
            peer = self._attach(address)
        return open_mapped(self.region.pool, self._layout, peer, address, begin, self._worker)

    def close(self) -> None:
        with self._peers_lock:
            for engine in list(self._peers):
                self._forget(engine)
        self._worker.shutdown(wait=True)
        self._region.close()

    def _attach(self, address: KVAddress) -> SharedRegion:
        kind, _, rest = address.endpoint.partition(":")
        pid, _, fd = rest.partition(":")
        if kind != "shm" or not pid.isdigit() or not fd.isdigit():
            raise PeerUnreachable(f"cannot put to {address.endpoint} from an shm engine")
        known = self._peers.get(address.engine_id)
        if known is not None and known[0] == address.epoch and Path(f"/proc/{pid}").exists():
            return known[2]
        self._forget(address.engine_id)
        self._forget_dead()
        region = SharedRegion.attach(int(pid), int(fd), address.epoch, self._layout)
        self._peers[address.engine_id] = (address.epoch, int(pid), region)
        return region

    def _forget_dead(self) -> None:
        """Let go of the memory of peers that are gone; a mapping would keep it alive."""
        for engine, (_, pid, _) in list(self._peers.items()):
            if not Path(f"/proc/{pid}").exists():
                self._forget(engine)

    def _forget(self, engine: EngineId) -> None:
        known = self._peers.pop(engine, None)
        if known is not None:
            # Behind puts under way, which still use its descriptor.
            self._worker.submit(known[2].close)
