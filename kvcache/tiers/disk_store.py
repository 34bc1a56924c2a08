"""Pages in a file, each held against its checksum when it comes back."""

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
from kvcache.memory.layout import KVLayout
from kvcache.tiers.ledger import Found, Ledger
from kvcache.tiers.store import page_shape
from kvcache.types import PageId

__all__ = ["DiskStore"]


class DiskStore:
    """A file of this user only. Without a name it is gone with the process.

    With a name it is there again for the next process: what is cached survives the engine (DéjàVu,
    replication to persistent storage), and in a folder of memory, as /dev/shm, it is the host's
    memory that has the replica. A page that was damaged, or never reached the disk, raises
    `OSError` (EIO), as a broken disk does. One page of memory stages the copies.
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
        """Take the room for `slots` pages in `folder` at once.

        `keep` is the file's name, and `fingerprint` (`KVLayout.fingerprint`) what its pages are of:
        those of another are forgotten, and so are all where there were more slots, or fewer. Raises
        `BadRequest` where there is no such folder, not that much room in it, or another process
        uses the file.
        """
        self.slots = slots
        self._staging = torch.empty(page_shape(layout), dtype=torch.uint8, pin_memory=pinned)
        self._bytes = self._staging.numpy().data.cast("B")
        self._sums: dict[PageId, bytes] = {}
        self._ledger: Ledger | None = None
        self._first = 0  # where the pages begin
        size = slots * len(self._bytes)
        try:
            self.fd = _named_file(folder / keep) if keep else _nameless_file(folder)
            self._close = weakref.finalize(self, os.close, self.fd)
            if keep:
                self._ledger = Ledger(
                    self.fd,
                    slots=slots,
                    page_size=layout.page_size,
                    page_bytes=len(self._bytes),
                    fingerprint=fingerprint,
                )
                self._first = self._ledger.size
                if not self._ledger.known:
                    os.ftruncate(self.fd, 0)
            os.posix_fallocate(self.fd, 0, self._first + size)
            if self._ledger is not None:
                self._ledger.begin()
        except BlockingIOError as error:
            why = f"{folder / keep} is in use by another engine"
            raise BadRequest(why, param="disk_dir") from error
        except OSError as error:
            why = f"{folder}: no room for {slots} pages ({size >> 20} MiB): {error.strerror}"
            raise BadRequest(why, param="disk_dir") from error

    @property
    def kept(self) -> bool:
        return self._ledger is not None

    def found(self) -> list[Found]:
        if self._ledger is None:
            return []
        found, self._sums = self._ledger.find()
        return found

    def buffer(self, slot: PageId) -> torch.Tensor:
        return self._staging

    def flush(self, slot: PageId, prefix: npt.NDArray[np.int32] | None = None) -> None:
        self._sums.pop(slot, None)
        if self._ledger is not None:
            self._ledger.blot(slot)
        if os.pwrite(self.fd, self._bytes, self._at(slot)) < len(self._bytes):
            raise OSError(errno.ENOSPC, "a page was written in part")
        self._sums[slot] = digest = self._sum()
        if self._ledger is not None and prefix is not None:
            self._ledger.enter(slot, prefix, digest)

    def fetch(self, slot: PageId) -> torch.Tensor:
        got = os.preadv(self.fd, [self._bytes], self._at(slot))
        if got < len(self._bytes) or self._sums.get(slot) != self._sum():
            raise OSError(errno.EIO, "a page is not what was written")
        return self._staging

    def close(self) -> None:
        self._close()

    def _at(self, slot: PageId) -> int:
        return self._first + (slot - 1) * len(self._bytes)

    def _sum(self) -> bytes:
        return hashlib.blake2b(self._bytes, digest_size=16).digest()


def _named_file(path: Path) -> int:
    """A descriptor of the file, mode 0600, which no other process has while this one lives.

    Raises `BlockingIOError` where one has.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(path, flags, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise
    return fd


def _nameless_file(folder: Path) -> int:
    """A descriptor of an empty file, mode 0600, that is in no folder."""
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR):
            raise
    # A file system, as some network ones, that has no files without a name.
    fd, name = tempfile.mkstemp(dir=folder)
    Path(name).unlink()
    return fd
