"""Memory that peers can write: a pool of pages and, before it, one control slot per receive lease.

    ┌ header ─────────────┬ slots ──────────────────────────────────┬ pool ───────────────────┐
    │ magic, epoch, slots │ nonce │ claim │ landed │ renewals │ …×N  │ KVLayout.shape           │
    └─────────────────────┴─────────────────────────────────────────┴─────────────────────────┘

The words need not lie where the pool does. What is here has both in host memory; a pool on a device
takes its words from `SharedSlots`.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import weakref
from dataclasses import replace
from functools import partial
from typing import Final, Protocol, Self

import numpy as np
import numpy.typing as npt
import torch

from kvcache.errors import PeerUnreachable, StaleEpoch
from kvcache.lease import SLOTS, WORDS, ControlSlots
from kvcache.memory.layout import KVLayout
from kvcache.memory.write_rights import WriteRights

__all__ = [
    "LocalRegion",
    "Region",
    "SharedRegion",
    "SharedSlots",
    "Slots",
]

MAGIC: Final = 0x6D_69_63_72_6F_6B_76_31  # "microkv1"
HEADER_BYTES: Final = 4096
POOL_AT: Final = HEADER_BYTES + SLOTS * WORDS * 8


class Slots(ControlSlots, Protocol):
    """Control slots, with the layout of the pool behind them."""

    layout: KVLayout


class Region(Slots, Protocol):
    """One engine's writable memory, seen by itself or by a peer."""

    pool: torch.Tensor  # KVLayout.shape, wherever it lies

    def close(self) -> None:
        """Let go of the memory."""
        ...


class LocalRegion:
    """Private memory, for peers in the same process."""

    def __init__(self, layout: KVLayout) -> None:
        self.layout = layout
        count = layout.nbytes // layout.dtype.itemsize
        self.pool = layout.view(torch.zeros(count, dtype=layout.dtype))
        self.slots: npt.NDArray[np.uint64] = np.zeros((SLOTS, WORDS), dtype=np.uint64)
        self._rights = WriteRights()

    def try_right(self, slot: int, share: int = 0) -> bool:
        return self._rights.try_right(slot, share)

    def drop_right(self, slot: int) -> None:
        self._rights.drop_right(slot)

    def close(self) -> None:
        pass


class SharedSlots:
    """Header and slots in a memfd, mapped by its owner and by its peers.

    A memfd is in no file system: nothing to clean up after a SIGKILL, no `/dev/shm` limit. Peers
    reach it through the owner's descriptor table (`/proc/PID/fd/FD`), for which they must be the
    same user; the owner takes no part and may even be stopped. The descriptor is closed by `close`
    or with the last reference.
    """

    def __init__(self, fd: int, layout: KVLayout) -> None:
        """Map an open memfd, which is this object's from now on. Use `create` or `attach`."""
        self.fd = fd
        self._close = weakref.finalize(self, os.close, fd)
        self.layout = layout
        self._map = mmap.mmap(fd, self._size(layout))
        words = np.frombuffer(self._map, dtype=np.uint64, count=SLOTS * WORDS, offset=HEADER_BYTES)
        self.slots = words.reshape(SLOTS, WORDS)
        # An OFD lock does not exclude threads that share the descriptor; WriteRights does.
        self._rights = WriteRights(partial(_take_lock, fd), partial(_drop_lock, fd))

    @classmethod
    def create(cls, layout: KVLayout, epoch: int) -> Self:
        """New memory, all zero, readable and writable by this user only."""
        fd = os.memfd_create("microserve-kv", os.MFD_CLOEXEC)
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, cls._size(layout))
        os.pwrite(fd, struct.pack("<QQQ", MAGIC, epoch, layout.pages), 0)
        return cls(fd, layout)

    @classmethod
    def attach(cls, pid: int, fd: int, epoch: int, like: KVLayout) -> Self:
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
            layout = replace(like, pages=pages)
            if os.fstat(own).st_size < cls._size(layout):
                raise StaleEpoch("the peer's memory has another layout")
        except OSError as error:  # as of a pipe that another process has there
            os.close(own)
            raise StaleEpoch(f"the engine's memory is gone: {error}") from error
        except BaseException:
            os.close(own)
            raise
        return cls(own, layout)

    def try_right(self, slot: int, share: int = 0) -> bool:
        return self._rights.try_right(slot, share)

    def drop_right(self, slot: int) -> None:
        self._rights.drop_right(slot)

    def close(self) -> None:
        """Idempotent."""
        # Tensors and arrays keep the mapping alive; it goes with the last of them.
        self._close()

    @classmethod
    def _size(cls, layout: KVLayout) -> int:
        return POOL_AT


class SharedRegion(SharedSlots):
    """A memfd with the pool behind the slots: all that `shm` needs."""

    def __init__(self, fd: int, layout: KVLayout) -> None:
        super().__init__(fd, layout)
        flat = torch.frombuffer(
            self._map,
            dtype=layout.dtype,
            count=layout.nbytes // layout.dtype.itemsize,
            offset=POOL_AT,
        )
        self.pool = layout.view(flat)

    @classmethod
    def _size(cls, layout: KVLayout) -> int:
        return POOL_AT + layout.nbytes


def _take_lock(fd: int, slot: int, share: int) -> bool:
    """The right as other processes see it: a lock on the slot's bytes."""
    try:
        _lock(fd, slot, fcntl.F_RDLCK if share else fcntl.F_WRLCK)
    except BlockingIOError:  # somebody has it
        return False
    return True


def _drop_lock(fd: int, slot: int) -> None:
    _lock(fd, slot, fcntl.F_UNLCK)


def _lock(fd: int, slot: int, kind: int) -> None:
    # struct flock: l_type, l_whence, l_start, l_len, l_pid (0 for OFD locks)
    start = HEADER_BYTES + slot * WORDS * 8
    flock = struct.pack("hhxxxxqqixxxx", kind, os.SEEK_SET, start, WORDS * 8, 0)
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, flock)
