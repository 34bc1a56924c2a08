"""The `cuda_ipc` transport: engines on the GPUs of one host. The sender maps the receiver's pool.

The control words are in host memory, as with `shm`. The pools are in GPU memory, and a put copies
its runs in one kernel on the sender's GPU.
"""

from __future__ import annotations

import os
import threading
import weakref
from dataclasses import dataclass
from typing import ClassVar, Final

from kvcache.errors import PeerUnreachable
from kvcache.lease import KVAddress, Put
from kvcache.memory import (
    Copies,
    Device,
    DeviceRegion,
    DeviceSlots,
    Mapping,
    PoolLayout,
    Process,
    Region,
)
from kvcache.transport.base import Registered
from kvcache.transport.endpoint import strip_scheme
from kvcache.transport.mapped import MappedSlots
from kvcache.transport.put import QueuedPut
from kvcache.transport.runs import Runs
from kvcache.transport.worker import Worker

__all__ = ["CudaIpcTarget", "CudaIpcTransport"]

PIDS: Final = 1 << 22  # Linux has no higher process ids
FORGET_S: Final = 1.0  # between two looks for dead peers


@dataclass(frozen=True, slots=True)
class _Endpoint:
    """Where a peer's words and pool are: `cuda_ipc:PID:FD:UUID:HANDLE`."""

    pid: int
    fd: int
    uuid: str  # of the GPU
    handle: bytes

    def __str__(self) -> str:
        return f"cuda_ipc:{self.pid}:{self.fd}:{self.uuid}:{self.handle.hex()}"

    @classmethod
    def parse(cls, endpoint: str) -> _Endpoint:
        """Raises `PeerUnreachable` if the endpoint is of another transport, or malformed."""
        fields = strip_scheme(endpoint, "cuda_ipc").split(":")
        try:
            pid, fd, uuid, handle = fields
            if pid.isdecimal() and fd.isdecimal() and int(pid) < PIDS:
                return cls(int(pid), int(fd), uuid, bytes.fromhex(handle))
        except ValueError:
            pass
        raise PeerUnreachable(f"{endpoint} is not a valid cuda_ipc endpoint")


@dataclass(frozen=True, slots=True)
class _Peer:
    """A peer's region as mapped here. Puts in flight have references of their own."""

    epoch: int
    process: Process
    slots: DeviceSlots
    pool: Mapping


class CudaIpcTarget(MappedSlots):
    """A `Target` on a GPU that this process can reach."""

    # Start, wait and words of a commit take some 0.2 ms, and within a GPU this many bytes 0.14 ms.
    commit_bytes: ClassVar[int] = 256 << 20

    def __init__(self, device: Device, copies: Copies, source: DeviceRegion, peer: _Peer) -> None:
        """`copies` is of the worker's thread."""
        super().__init__(peer.slots)
        self._device, self._copies = device, copies
        self._source, self._peer = source, peer

    def record_event(self) -> object:
        return self._device.record_event()

    def event_done(self, event: object) -> bool:
        return self._device.event_done(event)

    def copy(self, runs: Runs) -> None:
        # The memory of a process that ends should not be touched any more.
        if self._peer.process.is_over():
            raise PeerUnreachable("the peer's process has ended")
        self._copies.copy(self._source.memory, self._peer.pool.memory, runs)


class CudaIpcTransport:
    """A `Transport` over pools in GPU memory."""

    def __init__(self, epoch: int, device: Device) -> None:
        """Pools are on `device`."""
        self._epoch, self._device = epoch, device
        self._own = Registered(DeviceRegion)
        self._peers: dict[_Endpoint, _Peer] = {}
        self._peers_lock = threading.Lock()
        self._worker = Worker("put")
        self._closed = threading.Event()
        threading.Thread(
            target=_forget_dead, args=(weakref.ref(self), self._closed), daemon=True
        ).start()
        weakref.finalize(self, self._closed.set)

    def allocate(self, layout: PoolLayout) -> DeviceRegion:
        """Raises `BadRequest` if the pool does not fit on the GPU."""
        return DeviceRegion.on(self._device, layout, self._epoch)

    def register(self, region: Region) -> None:
        self._own.set(region)
        self._copies: Copies = self._device.copies()

    @property
    def region(self) -> DeviceRegion:
        return self._own.get()

    @property
    def endpoint(self) -> str:
        region = self.region
        return str(_Endpoint(os.getpid(), region.fd, self._device.uuid, region.handle))

    def open(self, address: KVAddress, begin: int, join: int | None = None) -> Put:
        source, where = self.region, _Endpoint.parse(address.endpoint)
        peer = self._attach(where, address)
        target = CudaIpcTarget(self._device, self._copies, source, peer)
        put = QueuedPut(target, source.layout, address, self._worker, join)
        put.take_claim(begin)
        return put

    def close(self) -> None:
        self._closed.set()
        self._worker.close()
        self._peers.clear()

    def forget_dead(self) -> None:
        """Drop the mappings of peers whose process has ended.

        A mapping keeps the pool of a dead engine allocated, and the next one wants that memory.
        """
        with self._peers_lock:
            for where, peer in list(self._peers.items()):
                if peer.process.is_over():
                    del self._peers[where]

    def _attach(self, where: _Endpoint, address: KVAddress) -> _Peer:
        with self._peers_lock:
            for other, known in list(self._peers.items()):
                # The mapping would keep the memory of a dead engine allocated.
                replaced = (other.pid, other.fd) == (where.pid, where.fd) and (
                    other != where or known.epoch != address.epoch
                )
                if replaced or known.process.is_over():
                    del self._peers[other]
            if where not in self._peers:
                # Before the memory is opened: if that is of the right epoch, so is the process.
                process = Process(where.pid)
                like = self.region.layout.of_peer(address.shards)
                slots = DeviceSlots.attach(where.pid, where.fd, address.epoch, like)
                pool = self._device.open_peer(where.handle, slots.layout.nbytes, where.uuid)
                self._peers[where] = _Peer(address.epoch, process, slots, pool)
            return self._peers[where]


def _forget_dead(transport: weakref.ref[CudaIpcTransport], closed: threading.Event) -> None:
    """Look for dead peers again and again, until the transport is closed or gone."""
    while not closed.wait(FORGET_S):
        if (alive := transport()) is None:
            return
        alive.forget_dead()
        del alive
