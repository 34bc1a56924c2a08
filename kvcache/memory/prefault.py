"""Memory before it is needed.

The first write to a page of a mapping waits until the kernel has found memory for it and cleared
it: many times as long as the write itself takes. A put of a prompt's KV would pay for that in the
sender, and once more for its own mapping of what is there already.
"""

from __future__ import annotations

import ctypes
import os
import threading
from queue import SimpleQueue

from kvcache.memory.region import SharedRegion

__all__ = ["Prefaulter"]

MADV_POPULATE_WRITE = 23  # Linux 5.14
PIECE_BYTES = 4 << 20  # the mapping is locked meanwhile, for a few milliseconds
LEAST = 19  # of all priorities

_madvise = ctypes.CDLL(None, use_errno=True).madvise  # lets go of the GIL
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Prefaulter:
    """A thread that has the kernel give pools their memory, piece by piece, while nobody else wants
    the processor. Nothing depends on it: where it cannot, or has not yet, the first write does."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[SharedRegion | None] = SimpleQueue()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="populate", daemon=True)
        self._thread.start()

    def add(self, region: SharedRegion) -> None:
        """Next, this one's pool."""
        self._queue.put(region)

    def close(self) -> None:
        """Leave the rest as it is; waits for the piece under way. Idempotent."""
        self._closed.set()
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LEAST)
        while (region := self._queue.get()) is not None:
            self._populate(region)
            del region  # nothing here is to keep a mapping

    def _populate(self, region: SharedRegion) -> None:
        begin = region.pool.data_ptr() // os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PAGE_SIZE")
        end = region.pool.data_ptr() + region.layout.nbytes
        for at in range(begin, end, PIECE_BYTES):
            if self._closed.is_set():
                return
            if _madvise(at, min(PIECE_BYTES, end - at), MADV_POPULATE_WRITE):
                return  # an old kernel, or no memory: who needs it will be told
