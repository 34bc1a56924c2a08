"""A thread that allocates the memory of pools before the first write.

The first write to a page of a mapping makes the kernel allocate and clear memory, which takes many
times as long as the write itself. Without prefaulting, a put would pay for this in the sender, and
again for the sender's own mapping of memory that exists already.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from queue import SimpleQueue

from kvcache.memory.region import Region

__all__ = ["USUAL_BYTES", "Prefaulter"]

MADV_POPULATE_WRITE = 23  # Linux 5.14
PIECE_BYTES = 4 << 20  # per call, which locks the mapping for a few milliseconds
LOWEST_PRIORITY = 19
# Of each pool. Pages are taken from the first one on, so the rest is allocated as the cache fills.
USUAL_BYTES = 256 << 20

_madvise = ctypes.CDLL(None, use_errno=True).madvise  # releases the GIL
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Prefaulter:
    """Populates the first bytes of pools piece by piece, on a thread of the lowest priority.

    It is an optimization only: where it fails or lags, the first write allocates. It keeps no
    region alive for longer than a piece, so the memory of a dead peer is released.
    """

    def __init__(self, most_bytes: int = USUAL_BYTES) -> None:
        """Populate at most `most_bytes` of each pool."""
        self._most = most_bytes
        self._queue: SimpleQueue[weakref.ref[Region] | None] = SimpleQueue()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="populate", daemon=True)
        self._thread.start()

    def add(self, region: Region) -> None:
        """Queue the pool of a region."""
        self._queue.put(weakref.ref(region))

    def close(self) -> None:
        """Stop after the current piece, and wait for it. Idempotent."""
        self._closed.set()
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
        while (reference := self._queue.get()) is not None:
            piece = 0
            while not self._closed.is_set() and _populate(reference(), piece, self._most):
                piece += 1


def _populate(region: Region | None, piece: int, most_bytes: int) -> bool:
    """Populate one piece of a pool. Return whether there may be others."""
    if region is None:
        return False
    system_page = os.sysconf("SC_PAGE_SIZE")
    end = region.pool.data_ptr() + min(region.layout.nbytes, most_bytes)
    at = region.pool.data_ptr() // system_page * system_page + piece * PIECE_BYTES
    if at >= end:
        return False
    # It fails on old kernels and without memory; in the latter case, the first write fails too.
    return not _madvise(at, min(PIECE_BYTES, end - at), MADV_POPULATE_WRITE)
