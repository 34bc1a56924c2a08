"""Puts into memory that is mapped here: what the `memory` and `shm` transports have in common."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch

from kvcache.address import KVAddress
from kvcache.layout import KVLayout
from kvcache.region import Region
from kvcache.transport.put import QueuedPut
from kvcache.transport.runs import Runs

__all__ = ["MappedTarget", "open_mapped"]

_memcpy = ctypes.CDLL(None).memcpy  # lets go of the GIL while it copies
_memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memcpy.restype = None


class MappedTarget:
    """A `Target` in this process's address space."""

    def __init__(self, source: torch.Tensor, region: Region) -> None:
        """`source` is our pool, `KVLayout.shape`; both pools are contiguous and on the CPU."""
        self._source, self._region = source, region  # their memory lives as long as this does
        self._from, self._from_layer = _layers(source)
        self._into, self._into_layer = _layers(region.pool)

    def try_right(self, slot: int) -> bool:
        return self._region.try_right(slot)

    def drop_right(self, slot: int) -> None:
        self._region.drop_right(slot)

    def words(self, slot: int) -> npt.NDArray[np.uint64]:
        words: npt.NDArray[np.uint64] = self._region.slots[slot]
        return words

    def store(self, slot: int, words: Mapping[int, int]) -> None:
        for word, value in words.items():
            self._region.slots[slot, word] = value

    def copy(self, layer: int, runs: Runs) -> None:
        into = runs[:, 1] + (self._into + layer * self._into_layer)
        source = runs[:, 0] + (self._from + layer * self._from_layer)
        # One loop in C over all runs: a call of torch costs more than the bytes of a page.
        deque(map(_memcpy, into.tolist(), source.tolist(), runs[:, 2].tolist()), maxlen=0)


def open_mapped(
    source: torch.Tensor,
    layout: KVLayout,
    region: Region,
    address: KVAddress,
    begin: int,
    worker: ThreadPoolExecutor,
) -> QueuedPut:
    """Claim a lease in a mapped region; `source` is our pool. Raises as `QueuedPut.take_claim`."""
    put = QueuedPut(MappedTarget(source, region), address, layout, worker)
    put.take_claim(begin)
    return put


def _layers(pool: torch.Tensor) -> tuple[int, int]:
    """Where a pool begins, and how many bytes a layer takes."""
    return pool.data_ptr(), pool.stride(0) * pool.element_size()
