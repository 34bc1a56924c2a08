"""Memory that peers can write: a pool of pages and, before it, one control slot per receive lease.

    ┌ header ─────────────┬ slots ──────────────────────────────────┬ pool ───────────────────┐
    │ magic, epoch, slots │ nonce │ claim │ landed │ renewals │ …×N  │ KVLayout.shape           │
    └─────────────────────┴─────────────────────────────────────────┴─────────────────────────┘

The regions here have slots and pool in host memory. The pool may also be elsewhere: a pool on a
device uses `SharedSlots` for its words.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import weakref
from typing import ClassVar, Final, Protocol, Self

import numpy as np
import numpy.typing as npt
import torch

from kvcache.errors import PeerUnreachable, StaleEpoch
from kvcache.lease import SLOTS, WORDS, ControlSlots
from kvcache.memory.layout import PoolLayout, SplitLayout
from kvcache.memory.write_rights import WriteRights
from kvcache.types import SlotIndex

__all__ = [
    "LocalRegion",
    "Region",
    "SharedRegion",
    "SharedSlots",
    "Slots",
]

MAGIC: Final = 0x6D_69_63_72_6F_6B_76_31  # "microkv1"
HEADER_BYTES: Final = 4096
WORD_BYTES: Final = 8


class Slots(ControlSlots, Protocol):
    """Control slots, with the layout of the pool behind them."""

    layout: PoolLayout


class Region(Slots, Protocol):
    """One engine's writable memory, as mapped by itself or by a peer."""

    pool: torch.Tensor  # as `PoolLayout.view` returns it, on any device
    # A descriptor through which processes of this engine can map the pool, and where it begins
    # there. -1: there is none.
    pool_fd: tuple[int, int]

    def close(self) -> None:
        """Release the memory."""
        ...


class LocalRegion:
    """Private memory, for peers in the same process.

    The workers of a split engine map its pool.
    """

    def __init__(self, layout: PoolLayout) -> None:
        self.layout = layout
        self.pool_fd = (-1, 0)
        # Zeroed by the kernel at the first use. `torch.zeros` would start a team of threads here.
        if isinstance(layout, SplitLayout):
            fd = _private_memfd(layout.nbytes)
            self._close = weakref.finalize(self, os.close, fd)
            memory = mmap.mmap(fd, layout.nbytes)
            self.pool_fd = fd, 0
        else:
            memory = mmap.mmap(-1, layout.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.pool = layout.view(torch.frombuffer(memory, dtype=layout.dtype))
        self.slots: npt.NDArray[np.uint64] = np.zeros((SLOTS, WORDS), dtype=np.uint64)
        self._rights = WriteRights()

    def try_acquire_right(self, slot: SlotIndex, share: int = 0) -> bool:
        return self._rights.try_acquire_right(slot, share)

    def release_right(self, slot: SlotIndex) -> None:
        self._rights.release_right(slot)

    def close(self) -> None:
        pass


class SharedSlots:
    """Header and slots in a memfd, mapped by its owner and by its peers.

    A memfd is in no file system, so a SIGKILL leaves nothing behind and the limit of `/dev/shm`
    does not apply. Peers open it through the owner's descriptor table (`/proc/PID/fd/FD`), as the
    same user. The owner takes no part and may even be stopped. The descriptor is closed by `close`
    or with the last reference.
    """

    MAGIC: ClassVar[int] = MAGIC  # of this class's memory
    ROW: ClassVar[int] = WORDS  # 64-bit words of a slot's row, which begins with the slot's words

    def __init__(self, fd: int, layout: PoolLayout) -> None:
        """Map an open memfd and take over its descriptor. Use `create` or `attach`."""
        self.fd = fd
        self._close = weakref.finalize(self, os.close, fd)
        self.layout = layout
        self._map = mmap.mmap(fd, self._size(layout))
        words = np.frombuffer(
            self._map, dtype=np.uint64, count=SLOTS * self.ROW, offset=HEADER_BYTES
        )
        self.table: npt.NDArray[np.uint64] = words.reshape(SLOTS, self.ROW)
        self.slots = self.table[:, :WORDS]
        self._rights = self._make_rights()

    @classmethod
    def create(cls, layout: PoolLayout, epoch: int) -> Self:
        """Create zeroed memory that only this user can read and write."""
        fd = _private_memfd(cls._size(layout))
        os.pwrite(fd, struct.pack("<QQQ", cls.MAGIC, epoch, layout.pages), 0)
        return cls(fd, layout)

    @classmethod
    def attach(cls, pid: int, fd: int, epoch: int, like: PoolLayout) -> Self:
        """Map a peer's memory. `like` is its layout except for the number of pages.

        Raises `PeerUnreachable` if the process or descriptor does not exist or belongs to another
        user, and `StaleEpoch` if the memory there is not of this epoch of the engine.
        """
        try:
            own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise PeerUnreachable(f"the peer's memory cannot be opened: {error}") from error
        try:
            header = os.pread(own, 24, 0)
            magic, theirs, pages = struct.unpack("<QQQ", header.ljust(24, b"\0"))
            if magic != cls.MAGIC or theirs != epoch:
                raise StaleEpoch("the engine was restarted since the address was made")
            layout = like.with_pages(pages)
            if os.fstat(own).st_size < cls._size(layout):
                raise StaleEpoch("the peer's memory has another layout")
        except OSError as error:  # the descriptor is not a memfd any more, but a pipe for example
            os.close(own)
            raise StaleEpoch(f"the engine's memory is gone: {error}") from error
        except BaseException:
            os.close(own)
            raise
        return cls(own, layout)

    def try_acquire_right(self, slot: SlotIndex, share: int = 0) -> bool:
        return self._rights.try_acquire_right(slot, share)

    def release_right(self, slot: SlotIndex) -> None:
        self._rights.release_right(slot)

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        # Tensors and arrays keep the mapping alive until the last of them is deleted.
        self._close()

    @classmethod
    def pool_at(cls) -> int:
        """Return the byte at which the slots end, and the pool begins where there is one."""
        return HEADER_BYTES + SLOTS * cls.ROW * WORD_BYTES

    @classmethod
    def _size(cls, layout: PoolLayout) -> int:
        return cls.pool_at()

    def _make_rights(self) -> WriteRights:
        # An OFD lock does not exclude threads that share the descriptor; WriteRights does.
        locks = RowLocks(self.fd, self.ROW)
        return WriteRights(locks.take, locks.drop)


class SharedRegion(SharedSlots):
    """A memfd with the pool behind the slots, for the `shm` transport."""

    def __init__(self, fd: int, layout: PoolLayout) -> None:
        super().__init__(fd, layout)
        flat = torch.frombuffer(
            self._map,
            dtype=layout.dtype,
            count=layout.nbytes // layout.dtype.itemsize,
            offset=self.pool_at(),
        )
        self.pool = layout.view(flat)
        self.pool_fd = fd, self.pool_at()

    @classmethod
    def _size(cls, layout: PoolLayout) -> int:
        return cls.pool_at() + layout.nbytes


class RowLocks:
    """Locks of the rows of slots among processes. The kernel releases those of a dead one."""

    def __init__(self, fd: int, row: int) -> None:
        """`fd` is of a memfd whose rows have `row` words."""
        self._fd, self._bytes = fd, row * WORD_BYTES

    def take(self, slot: int, share: int) -> bool:
        """Lock a row; return False if another process has it."""
        return self._lock(slot, fcntl.F_RDLCK if share else fcntl.F_WRLCK)

    def drop(self, slot: int) -> None:
        """Unlock a row."""
        self._lock(slot, fcntl.F_UNLCK)

    def _lock(self, slot: int, kind: int) -> bool:
        # struct flock: l_type, l_whence, l_start, l_len, l_pid (0 for OFD locks)
        start = HEADER_BYTES + slot * self._bytes
        flock = struct.pack("hhxxxxqqixxxx", kind, os.SEEK_SET, start, self._bytes, 0)
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, flock)
        except BlockingIOError:
            return False
        return True


def _private_memfd(size: int) -> int:
    """Return a descriptor of zeroed memory that only this user can read and write."""
    fd = os.memfd_create("microserve-kv", os.MFD_CLOEXEC)
    os.fchmod(fd, 0o600)
    os.ftruncate(fd, size)
    return fd
