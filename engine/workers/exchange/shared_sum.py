"""Sums over the workers of a stage, through memory that they share.

A layer needs two of them. Over gloo, each takes longer than a layer of a small model.

    ┌ numbers, stop word ────┬ summands, for sums with even numbers ─┬ for those with odd ones ─┐
    │ of each worker's sum   │ of each worker: [ROWS, width]         │                          │
    └────────────────────────┴───────────────────────────────────────┴──────────────────────────┘

A worker writes its summand, then its number; it reads the others' summands once their numbers are
as high. It may then begin the next sum while others still read, but not the one after: that one
begins when all have written their numbers of the next. So two places for each worker suffice.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["SharedSum", "set_stopped", "sum_bytes"]

ROWS: Final = 1024  # of a sum; more are summed in parts
LINE: Final = 8  # words of a cache line: each worker writes its own
SPINS: Final = 2000  # looks at the numbers before others may have the core
YIELD_S: Final = 0.002  # of such looks; then the worker sleeps between them
SLEEP_S: Final = 0.0001
TIMEOUT_S: Final = 600.0  # longer than any step: a worker that has not come by then is gone


def sum_bytes(workers: int, width: int, dtype: torch.dtype) -> int:
    """Return the size of the memory for sums of rows of `width` elements."""
    return _head(workers) + 2 * workers * ROWS * width * dtype.itemsize


class SharedSum:
    """One worker's view of the memory. Calls are made by one thread, in the same order by all."""

    def __init__(self, fd: int, workers: int, rank: int, width: int, dtype: torch.dtype) -> None:
        """Map `sum_bytes` of a file. `rank` is the worker's number in its stage."""
        memory = mmap.mmap(fd, sum_bytes(workers, width, dtype))
        self._numbers, self._stop = _words(memory, workers)
        self._parts = torch.frombuffer(memory, dtype=dtype, offset=_head(workers)).view(
            2, workers, ROWS, width
        )
        self._rank = rank
        self._number = 0  # of the latest sum
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Begin anew with the first sum. All workers have to, while none of them sums."""
        self._number = self._numbers[self._rank] = 0

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum of all workers' tensors, [rows, width], with the same bits on each.

        The summands are added in the order of the workers, in float32, so that the bits of a row do
        not depend on the other rows. Raises `TimeoutError` if a worker does not come, and
        `InterruptedError` after `set_stopped`.
        """
        rows = len(tensor)
        if rows > ROWS:
            return torch.cat([self(piece) for piece in torch.split(tensor, ROWS)])
        self._number += 1
        parts = self._parts[self._number % 2, :, :rows]
        parts[self._rank].copy_(tensor)
        self._fence()
        self._numbers[self._rank] = self._number
        self._wait()
        self._fence()
        total = parts[0].float() if tensor.dtype != torch.float32 else parts[0].clone()
        for part in parts[1:]:
            total += part
        return total.to(tensor.dtype)

    def _wait(self) -> None:
        """Wait until all workers have written their summands of this sum."""
        numbers, number = self._numbers, self._number
        for _ in range(SPINS):
            if numbers.min() >= number:
                return
        began = now = time.monotonic()
        while numbers.min() < number:
            if now < began + YIELD_S:
                os.sched_yield()
            else:  # the other worker has no core now, so it may have this one
                time.sleep(SLEEP_S)
            if self._stop[0]:
                raise InterruptedError(f"sum {number} was stopped: a worker of the stage is lost")
            now = time.monotonic()
            if now > began + TIMEOUT_S:
                raise TimeoutError(f"a worker has not come to sum {number}")

    def _fence(self) -> None:
        """Keep memory accesses before and behind it in order, also on processors that need it."""
        for _ in range(2):  # what is before the first release is done before the second acquire
            with self._lock:
                pass


def set_stopped(memory: mmap.mmap, workers: int, *, stopped: bool) -> None:
    """Have all workers that wait in this memory give up, or let sums begin again."""
    _, stop = _words(memory, workers)
    stop[0] = stopped


def _words(memory: mmap.mmap, workers: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return each worker's number, and the word that stops all."""
    words = np.frombuffer(memory, dtype=np.int64, count=(workers + 1) * LINE)
    return words.reshape(workers + 1, LINE)[:-1, 0], words[-LINE:]


def _head(workers: int) -> int:
    """Return the bytes of the numbers, in whole pages."""
    return -(-(workers + 1) * LINE * 8 // mmap.PAGESIZE) * mmap.PAGESIZE
