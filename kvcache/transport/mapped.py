"""Puts into memory that is mapped here: what the `memory` and `shm` transports have in common."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from kvcache.memory.layout import KVLayout
from kvcache.memory.region import Region, Slots
from kvcache.transport.runs import Runs
from kvcache.transport.target import AtOnce

__all__ = ["MappedSlots", "MappedTarget"]

_memcpy = ctypes.CDLL(None).memcpy  # lets go of the GIL while it copies
_memcpy_at_once = ctypes.PyDLL(None).memcpy  # keeps it
for _copy in (_memcpy, _memcpy_at_once):
    _copy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    _copy.restype = None
AT_ONCE_BYTES: Final = 64 << 10  # runs up to here take microseconds
PIECE_BYTES: Final = 256 << 10  # memcpy of megabytes is a fifth slower than piece by piece


class MappedSlots:
    """The words of a `Target`, for all whose slots are mapped here, wherever the pool is."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots

    @property
    def layout(self) -> KVLayout:
        return self._slots.layout

    def try_right(self, slot: int, share: int = 0) -> bool:
        return self._slots.try_right(slot, share)

    def drop_right(self, slot: int) -> None:
        self._slots.drop_right(slot)

    def words(self, slot: int) -> npt.NDArray[np.uint64]:
        words: npt.NDArray[np.uint64] = self._slots.slots[slot]
        return words

    def store(self, slot: int, words: Mapping[int, int]) -> None:
        for word, value in words.items():
            self._slots.slots[slot, word] = value


class MappedTarget(AtOnce, MappedSlots):
    """A `Target` in this process's address space."""

    def __init__(self, source: Region, region: Region) -> None:
        """`source` is ours. Both pools are contiguous and on the CPU."""
        super().__init__(region)
        self._pools = source.pool, region.pool  # they live as long as this does
        self._bases = np.array([source.pool.data_ptr(), region.pool.data_ptr(), 0])

    def copy(self, runs: Runs) -> None:
        of, into, size = (runs + self._bases).T.tolist()
        if max(size) <= AT_ONCE_BYTES:
            # One loop in C over all runs: a call of torch costs more than the bytes of a page. To
            # let go of the GIL costs as much as a short run, and to get it back may take longer.
            deque(map(_memcpy_at_once, into, of, size), maxlen=0)
            return
        for source, target, length in zip(of, into, size, strict=True):
            for at in range(0, length, PIECE_BYTES):
                _memcpy(target + at, source + at, min(PIECE_BYTES, length - at))
