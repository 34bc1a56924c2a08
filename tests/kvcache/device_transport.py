"""A transport for pools on a device, an example of a new transport made of the real ones' parts.

The "device" is memory that no peer maps. It is reached by copy calls only, like a GPU's. The
control words are in host memory. Work is started and runs later, in order, as on a stream. This
module has everything that a transport must implement.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from kvcache.errors import PeerUnreachable
from kvcache.lease.address import KVAddress
from kvcache.lease.put import Put
from kvcache.memory.layout import KVLayout
from kvcache.memory.region import Region, SharedSlots
from kvcache.transport.base import Registered
from kvcache.transport.endpoint import strip_scheme
from kvcache.transport.mapped import MappedSlots
from kvcache.transport.put import QueuedPut
from kvcache.transport.runs import Runs
from kvcache.transport.worker import Worker


class DeviceRegion(SharedSlots):
    """Slots on the host, and a pool on the device, where only its owner computes."""

    def __init__(self, fd: int, layout: KVLayout) -> None:
        super().__init__(fd, layout)
        self.device = os.memfd_create("device")
        os.ftruncate(self.device, layout.nbytes)
        memory = mmap.mmap(self.device, layout.nbytes)
        self.pool = layout.view(torch.frombuffer(memory, dtype=layout.dtype))
        self._stream = ThreadPoolExecutor(1)
        self.started: Future[None] | None = None

    def start(self, kernel: Callable[[], None]) -> None:
        """Run `kernel` on the device after all kernels started before."""
        self.started = self._stream.submit(kernel)

    def close(self) -> None:
        self._stream.shutdown()
        super().close()
        os.close(self.device)


class DeviceTarget(MappedSlots):
    def __init__(self, ours: DeviceRegion, slots: SharedSlots, theirs: int) -> None:
        super().__init__(slots)
        self._ours, self._theirs = ours, theirs

    def record_event(self) -> Future[None] | None:
        return self._ours.started

    def event_done(self, event: object) -> bool:
        assert isinstance(event, Future)
        return event.done()

    def copy(self, runs: Runs) -> None:
        for source, target, size in runs.tolist():
            os.pwrite(self._theirs, os.pread(self._ours.device, size, source), target)

    def __del__(self) -> None:
        os.close(self._theirs)


class DeviceTransport:
    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self._own = Registered(DeviceRegion)
        self._worker = Worker("put")

    def allocate(self, layout: KVLayout) -> DeviceRegion:
        return DeviceRegion.create(layout, self._epoch)

    def register(self, region: Region) -> None:
        self._own.set(region)

    @property
    def region(self) -> DeviceRegion:
        return self._own.get()

    @property
    def endpoint(self) -> str:
        return f"device:{os.getpid()}:{self.region.fd}:{self.region.device}"

    def open(self, address: KVAddress, begin: int, join: int | None = None) -> Put:
        pid, fd, device = map(int, strip_scheme(address.endpoint, "device").split(":"))
        like = self.region.layout.of_peer(address.shards)
        slots = SharedSlots.attach(pid, fd, address.epoch, like)
        try:
            theirs = os.open(f"/proc/{pid}/fd/{device}", os.O_RDWR)
        except OSError as error:
            raise PeerUnreachable(f"the peer's device cannot be opened: {error}") from error
        target = DeviceTarget(self.region, slots, theirs)
        put = QueuedPut(target, self.region.layout, address, self._worker, join)
        put.take_claim(begin)
        return put

    def close(self) -> None:
        self._worker.close()
