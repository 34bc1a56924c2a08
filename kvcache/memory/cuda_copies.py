"""Copies of runs between pools on GPUs, on a stream of their own."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from kvcache.errors import Internal

__all__ = ["CudaCopies"]

log = logging.getLogger(__name__)

Runs = npt.NDArray[np.int64]  # [runs, 3]: offset in the source, in the target, bytes
Memcpy = Callable[[int, int, int, int], None]  # target, source, bytes, stream

HIGH_PRIORITY = -1  # a peer waits for these, and the write right is held for as long
LEAST_RUNS = 4096  # room for so many from the start

_kernel_works: dict[int, bool] = {}  # by index of the device


class CudaCopies:
    """Implements `Copies`: one kernel per call, or a call of `memcpy` per run without Triton."""

    def __init__(self, device: torch.device, memcpy: Memcpy) -> None:
        """The first one on a device compiles the kernel for runs of 16 bytes' alignment."""
        self._device, self._memcpy = device, memcpy
        self._stream = torch.cuda.Stream(device, HIGH_PRIORITY)  # type: ignore[no-untyped-call]
        self._lost = ""  # why this process can do nothing on the GPU any more
        # `[runs, 3]`: pinned in host memory, and on the device.
        self._pinned = self._runs = torch.empty(0, 3)
        self._make_room(LEAST_RUNS)
        if device.index not in _kernel_works:
            _kernel_works[device.index] = self._try_kernel()
        self.by_kernel = _kernel_works[device.index]

    def copy(self, source: torch.Tensor, target: torch.Tensor, runs: Runs) -> None:
        if self._lost:
            raise Internal(self._lost)
        try:
            with torch.cuda.stream(self._stream):
                if self.by_kernel:
                    self._start_kernel(source, target, runs)
                else:
                    self._start_copies(source, target, runs)
                self._stream.synchronize()
        except Exception as error:
            raise self._failure(error) from error

    def _start_kernel(self, source: torch.Tensor, target: torch.Tensor, runs: Runs) -> None:
        from kvcache.kernels import copy_runs

        planned = copy_runs.plan(runs)
        count = len(planned.runs)
        self._make_room(count)
        self._pinned[:count].numpy()[:] = planned.runs
        there = self._runs[:count]
        there.copy_(self._pinned[:count], non_blocking=True)
        copy_runs.launch(source, target, there, planned)

    def _start_copies(self, source: torch.Tensor, target: torch.Tensor, runs: Runs) -> None:
        stream: int = self._stream.cuda_stream
        bases = np.array([source.data_ptr(), target.data_ptr(), 0])
        for begin, to, length in (runs + bases).tolist():
            if length:
                self._memcpy(to, begin, length, stream)

    def _make_room(self, runs: int) -> None:
        """Have memory for so many runs, pinned on the host and on the device.

        Called with no copy in flight.
        """
        there = len(self._pinned)
        if runs <= there:
            return
        shape = max(runs, 2 * there), 3
        with torch.cuda.stream(self._stream):
            self._pinned = torch.empty(shape, dtype=torch.int64, pin_memory=True)
            self._runs = torch.empty(shape, dtype=torch.int64, device=self._device)

    def _try_kernel(self) -> bool:
        """Return whether the kernel can be compiled and copies short and long runs."""
        size = 1 << 20
        with torch.cuda.stream(self._stream):
            source = torch.arange(size // 8, device=self._device).view(torch.uint8)
            for length in (64, size // 4):
                target = torch.zeros_like(source)
                runs = np.array([[length * 2, length, length]], dtype=np.int64)
                try:
                    self._start_kernel(source, target, runs)
                    self._stream.synchronize()
                except Exception as error:  # noqa: BLE001 - no Triton, no compiler, an old GPU
                    log.warning("puts on the GPU are slow, without a kernel of Triton: %s", error)
                    return False
                wanted = torch.zeros_like(source)
                wanted[length : 2 * length] = source[2 * length : 3 * length]
                if not torch.equal(target, wanted):
                    log.error("puts on the GPU are slow: the kernel of Triton does not copy")
                    return False
        return True

    def _failure(self, error: Exception) -> Internal:
        """Return what the caller sees, once nothing of the failed call is in flight any more."""
        try:
            self._stream.synchronize()
        except Exception:  # noqa: BLE001 - any error here outlives the call that caused it
            self._lost = (
                f"this process has lost its GPU and must be restarted; the first error: {error}"
            )
            log.critical("%s", self._lost)
            return Internal(self._lost)
        return Internal(f"a copy on the GPU failed: {error}")
