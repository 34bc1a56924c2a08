"""Memory that peers can write: a pool of pages and, before it, one control slot per receive lease.

    ┌ header ─────────────┬ slots ──────────────────────────────────┬ pool ───────────────────┐
    │ magic, epoch, slots │ nonce │ claim │ landed │ renewals │ …×N  │ KVLayout.shape           │
    └─────────────────────┴─────────────────────────────────────────┴─────────────────────────┘

A slot's words, each written whole by one aligned store:

- `nonce`: the lease that the slot serves; 0 when closed. Written by the owner only.
- `claim`: the sender that may write; 0: none yet. The latest claim counts, earlier ones are fenced.
- `landed`: the contiguous watermark, in tokens; it rises when all layers of a chunk are complete.
- `renewals`: counted up by the sender while it lives; the lease measures liveness with it.

**The write right.** Whoever changes a slot or the pages behind it holds the slot's lock while doing
so, and rereads `nonce` and `claim` under it. The owner closes a lease by clearing `nonce`, and then
only tries for the lock: if it gets it, no write is in flight and none can follow. In shared memory
the lock is an open-file-description lock on the slot's bytes, which the kernel holds for a stopped
process and drops for a killed one.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import threading
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvcache.errors import PeerUnreachable, StaleEpoch
from kvcache.layout import KVLayout

__all__ = ["CLAIM", "LANDED", "NONCE", "RENEWALS", "SLOTS", "LocalRegion", "Region", "SharedRegion"]

NONCE: Final = 0
CLAIM: Final = 1
LANDED: Final = 2
RENEWALS: Final = 3
WORDS: Final = 8  # a cache line each
SLOTS: Final = 1024  # leases at a time
MAGIC: Final = 0x6D_69_63_72_6F_6B_76_31  # "microkv1"
HEADER_BYTES: Final = 4096
POOL_AT: Final = HEADER_BYTES + SLOTS * WORDS * 8


class Region(Protocol):
    """One engine's writable memory, seen by itself or by a peer."""

    pool: torch.Tensor  # KVLayout.shape
    slots: npt.NDArray[np.uint64]  # [SLOTS, WORDS]

    def try_right(self, slot: int) -> bool:
        """Take the write right of a slot if nobody has it; never waits."""
        ...

    def drop_right(self, slot: int) -> None:
        """Give it back."""
        ...

    def close(self) -> None:
        """Let go of the memory."""
        ...


class LocalRegion:
    """Private memory, for peers in the same process."""

    def __init__(self, layout: KVLayout) -> None:
        self.pool = torch.zeros(layout.shape, dtype=layout.dtype)
        self.slots: npt.NDArray[np.uint64] = np.zeros((SLOTS, WORDS), dtype=np.uint64)
        self._locks = [threading.Lock() for _ in range(SLOTS)]

    def try_right(self, slot: int) -> bool:
        return self._locks[slot].acquire(blocking=False)

    def drop_right(self, slot: int) -> None:
        self._locks[slot].release()

    def close(self) -> None:
        pass


class SharedRegion:
    """A memfd, mapped by its owner and by its peers.

    A memfd is in no file system: nothing to clean up after a SIGKILL, no `/dev/shm` limit. Peers
    reach it through the owner's descriptor table (`/proc/PID/fd/FD`), for which they must be the
    same user; the owner takes no part and may even be stopped.
    """

    def __init__(self, fd: int, layout: KVLayout) -> None:
        """Map an open memfd. Use `create` or `attach`."""
        self.fd = fd
        self._map = mmap.mmap(fd, POOL_AT + layout.nbytes)
        words = np.frombuffer(self._map, dtype=np.uint64, count=SLOTS * WORDS, offset=HEADER_BYTES)
        self.slots = words.reshape(SLOTS, WORDS)
        flat = torch.frombuffer(
            self._map,
            dtype=layout.dtype,
            count=layout.nbytes // layout.dtype.itemsize,
            offset=POOL_AT,
        )
        self.pool = flat.view(layout.shape)
        # An OFD lock does not exclude threads that share the descriptor. Rights are held for the
        # length of one copy, so one mutex for all slots is enough.
        self._mutex = threading.Lock()

    @classmethod
    def create(cls, layout: KVLayout, epoch: int) -> SharedRegion:
        """New memory, all zero, readable and writable by this user only."""
        fd = os.memfd_create("microserve-kv", os.MFD_CLOEXEC)
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, POOL_AT + layout.nbytes)
        os.pwrite(fd, struct.pack("<QQQ", MAGIC, epoch, layout.pages), 0)
        return cls(fd, layout)

    @classmethod
    def attach(cls, pid: int, fd: int, epoch: int, like: KVLayout) -> SharedRegion:
        """Map a peer's memory; `like` gives all of its layout but the number of pages.

        Raises `PeerUnreachable` if there is no such process or descriptor, or if it is another
        user's, and `StaleEpoch` if what is there belongs to another life of the engine.
        """
        try:
            own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise PeerUnreachable(f"the peer's memory cannot be opened: {error}") from error
        try:
            header = os.pread(own, 24, 0)
            magic, theirs, pages = struct.unpack("<QQQ", header.ljust(24, b"\0"))
            if magic != MAGIC or theirs != epoch:
                raise StaleEpoch("the engine was restarted since the address was made")
            layout = KVLayout(
                like.layers, pages, like.page_size, like.kv_heads, like.head_dim, like.dtype
            )
            if os.fstat(own).st_size < POOL_AT + layout.nbytes:
                raise StaleEpoch("the peer's memory has another layout")
            return cls(own, layout)
        except BaseException:
            os.close(own)
            raise

    def try_right(self, slot: int) -> bool:
        if not self._mutex.acquire(blocking=False):
            return False
        try:
            self._lock(slot, fcntl.F_WRLCK)
        except BlockingIOError:  # somebody has it
            self._mutex.release()
            return False
        except BaseException:
            self._mutex.release()
            raise
        return True

    def drop_right(self, slot: int) -> None:
        self._lock(slot, fcntl.F_UNLCK)
        self._mutex.release()

    def close(self) -> None:
        # Tensors and arrays keep the mapping alive; it goes with the last of them.
        os.close(self.fd)

    def _lock(self, slot: int, kind: int) -> None:
        # struct flock: l_type, l_whence, l_start, l_len, l_pid (0 for OFD locks)
        start = HEADER_BYTES + slot * WORDS * 8
        flock = struct.pack("hhxxxxqqixxxx", kind, os.SEEK_SET, start, WORDS * 8, 0)
        fcntl.fcntl(self.fd, fcntl.F_OFD_SETLK, flock)
