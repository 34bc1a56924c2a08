"""A device whose memory no peer maps as its own host memory, for tests of `CudaIpcTransport`.

It stands for the calls of CUDA alone. Its memory is a memfd that is reached through handles, and
its work is started and runs later, in order, as on a stream.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch

from kvcache.errors import PeerUnreachable
from kvcache.transport.cuda_ipc import CudaIpcTransport

UUID = "00fa4e"


class FakeMemory:
    """Implements `Allocation` and `Mapping`."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self.handle = f"{os.getpid()}:{fd}".encode()
        self.memory = torch.frombuffer(mmap.mmap(fd, nbytes), dtype=torch.uint8)
        self.kept = False
        weakref.finalize(self, os.close, fd)

    def keep(self) -> None:
        self.kept = True


class FakeCopies:
    """Copies byte by byte, on a thread of their own."""

    def __init__(self) -> None:
        self._stream = ThreadPoolExecutor(1)

    def copy(self, source: torch.Tensor, target: torch.Tensor, runs: npt.NDArray[np.int64]) -> None:
        self._stream.submit(self._copy, source.numpy(), target.numpy(), runs).result()

    def _copy(
        self,
        source: npt.NDArray[np.uint8],
        target: npt.NDArray[np.uint8],
        runs: npt.NDArray[np.int64],
    ) -> None:
        for begin, to, size in runs.tolist():
            target[to : to + size] = source[begin : begin + size]


class FakeDevice:
    """Implements `Device`."""

    device = torch.device("cpu")
    uuid = UUID

    def __init__(self) -> None:
        self._stream = ThreadPoolExecutor(1)
        self._started: Future[None] | None = None

    def start(self, kernel: Callable[[], None]) -> None:
        """Run `kernel` on the device after all kernels started before."""
        self._started = self._stream.submit(kernel)

    def allocate(self, nbytes: int) -> FakeMemory:
        fd = os.memfd_create("device")
        os.ftruncate(fd, nbytes)
        return FakeMemory(fd, nbytes)

    def open_peer(self, handle: bytes, nbytes: int, uuid: str) -> FakeMemory:
        if uuid != self.uuid:
            raise PeerUnreachable(f"there is no device {uuid} here")
        pid, _, fd = handle.decode().partition(":")
        try:
            return FakeMemory(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR), nbytes)
        except OSError as error:
            raise PeerUnreachable(f"the peer's device cannot be opened: {error}") from error

    def record_event(self) -> object:
        return self._started

    def event_done(self, event: object) -> bool:
        assert isinstance(event, Future)
        return event.done()

    def copies(self) -> FakeCopies:
        return FakeCopies()


def fake_device_transport(epoch: int) -> CudaIpcTransport:
    return CudaIpcTransport(epoch, FakeDevice())
