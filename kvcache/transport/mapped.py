"""Puts into memory mapped into this process, as the `memory` and `shm` transports make them."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from kvcache.memory import PoolLayout, Region, Slots
from kvcache.transport.runs import Runs
from kvcache.transport.target import HostTarget
from kvcache.types import SlotIndex

__all__ = ["MappedSlots", "MappedTarget"]

_memcpy = ctypes.CDLL(None).memcpy  # releases the GIL while it copies
_memcpy_with_gil = ctypes.PyDLL(None).memcpy  # keeps it
for _copy in (_memcpy, _memcpy_with_gil):
    _copy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    _copy.restype = None
WITH_GIL_BYTES: Final = 64 << 10  # copies of runs up to this length take microseconds
PIECE_BYTES: Final = 256 << 10  # one memcpy of megabytes is 20 % slower than pieces of this size


class MappedSlots:
    """The slot methods of a `Target` whose slots are mapped here; the pool may be anywhere."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots

    @property
    def layout(self) -> PoolLayout:
        return self._slots.layout

    def try_acquire_right(self, slot: SlotIndex, share: int = 0) -> bool:
        return self._slots.try_acquire_right(slot, share)

    def release_right(self, slot: SlotIndex) -> None:
        self._slots.release_right(slot)

    def words(self, slot: SlotIndex) -> npt.NDArray[np.uint64]:
        words: npt.NDArray[np.uint64] = self._slots.slots[slot]
        return words

    def store(self, slot: SlotIndex, words: Mapping[int, int]) -> None:
        for word, value in words.items():
            self._slots.slots[slot, word] = value


class MappedTarget(HostTarget, MappedSlots):
    """A `Target` in this process's address space."""

    def __init__(self, source: Region, region: Region) -> None:
        """`source` is the sender's region, `region` the peer's. Both pools are in host memory."""
        super().__init__(region)
        self._pools = source.pool, region.pool  # keeps the memory behind `_bases` alive
        self._bases = np.array([source.pool.data_ptr(), region.pool.data_ptr(), 0])

    def copy(self, runs: Runs) -> None:
        sources, targets, lengths = (runs + self._bases).T.tolist()
        if max(lengths) <= WITH_GIL_BYTES:
            # One loop in C over all runs: a torch call costs more than copying a page. Releasing
            # the GIL costs as much as a short run, and reacquiring it may take longer.
            deque(map(_memcpy_with_gil, targets, sources, lengths), maxlen=0)
            return
        for source, target, length in zip(sources, targets, lengths, strict=True):
            for at in range(0, length, PIECE_BYTES):
                _memcpy(target + at, source + at, min(PIECE_BYTES, length - at))
