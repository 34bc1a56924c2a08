"""Pages in a file, each verified by its checksum when it is read."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import tempfile
import weakref
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from kvcache.errors import BadRequest
from kvcache.memory import KVLayout
from kvcache.tiers.ledger import Ledger, StoredPrefix
from kvcache.tiers.store import page_shape
from kvcache.types import PageId

__all__ = ["DiskStore"]


class DiskStore:
    """A `TierStore` in a file that only this user can access. A file without a name is temporary.

    A file with a name is found by the next process, so the cache survives the engine (DéjàVu,
    replication to persistent storage). In a memory file system such as /dev/shm, the host's memory
    holds the replica. A page that was damaged, or never reached the disk, raises `OSError` (EIO),
    as a broken disk would. Copies are staged in one page of memory.
    """

    name = "disk"

    def __init__(
        self,
        layout: KVLayout,
        slots: int,
        folder: Path,
        *,
        pinned: bool = False,
        keep: str = "",
        fingerprint: str = "",
    ) -> None:
        """Allocate space for `slots` pages in `folder`.

        `keep` is the file's name, or empty. `fingerprint` (`KVLayout.fingerprint`) identifies the
        contents of its pages: the pages of a file with another fingerprint, or with another number
        of slots, are discarded.

        Raises: `BadRequest` if the folder does not exist, has too little space, or if another
        process uses the file.
        """
        self.slots = slots
        self._staging = torch.empty(page_shape(layout), dtype=torch.uint8, pin_memory=pinned)
        self._bytes = self._staging.numpy().data.cast("B")
        self._sums: dict[PageId, bytes] = {}
        self._ledger: Ledger | None = None
        self._pages_offset = 0  # of the first page in the file, bytes
        size = slots * len(self._bytes)
        try:
            self.fd = _open_named(folder / keep) if keep else _open_unnamed(folder)
            self._close = weakref.finalize(self, os.close, self.fd)
            if keep:
                self._ledger = Ledger(
                    self.fd,
                    slots=slots,
                    page_size=layout.page_size,
                    page_bytes=len(self._bytes),
                    fingerprint=fingerprint,
                )
                self._pages_offset = self._ledger.size
                if not self._ledger.matches:
                    os.ftruncate(self.fd, 0)
            os.posix_fallocate(self.fd, 0, self._pages_offset + size)
            if self._ledger is not None:
                self._ledger.write_header()
        except BlockingIOError as error:
            message = f"{folder / keep} is in use by another engine"
            raise BadRequest(message, param="disk_dir") from error
        except OSError as error:
            message = f"{folder}: no room for {slots} pages ({size >> 20} MiB): {error.strerror}"
            raise BadRequest(message, param="disk_dir") from error

    @property
    def persistent(self) -> bool:
        return self._ledger is not None

    def load_prefixes(self) -> list[StoredPrefix]:
        if self._ledger is None:
            return []
        prefixes, self._sums = self._ledger.load()
        return prefixes

    def buffer(self, slot: PageId) -> torch.Tensor:
        return self._staging

    def flush(self, slot: PageId, prefix: npt.NDArray[np.int32] | None = None) -> None:
        self._sums.pop(slot, None)
        if self._ledger is not None:
            self._ledger.erase(slot)
        if os.pwrite(self.fd, self._bytes, self._at(slot)) < len(self._bytes):
            raise OSError(errno.ENOSPC, "only a part of a page was written")
        self._sums[slot] = digest = self._sum()
        if self._ledger is not None and prefix is not None:
            self._ledger.write(slot, prefix, digest)

    def fetch(self, slot: PageId) -> torch.Tensor:
        count = os.preadv(self.fd, [self._bytes], self._at(slot))
        if count < len(self._bytes) or self._sums.get(slot) != self._sum():
            raise OSError(errno.EIO, "a page does not match its checksum")
        return self._staging

    def close(self) -> None:
        self._close()

    def _at(self, slot: PageId) -> int:
        return self._pages_offset + (slot - 1) * len(self._bytes)

    def _sum(self) -> bytes:
        return hashlib.blake2b(self._bytes, digest_size=16).digest()


def _open_named(path: Path) -> int:
    """Open or create the file, mode 0600, and lock it for the life of the descriptor.

    Raises: `BlockingIOError` if another process has the lock.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(path, flags, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise
    return fd


def _open_unnamed(folder: Path) -> int:
    """Open an empty file, mode 0600, without a directory entry."""
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR):
            raise
    # Some file systems, network ones for example, do not support O_TMPFILE.
    fd, name = tempfile.mkstemp(dir=folder)
    Path(name).unlink()
    return fd
