"""Pages in a file that nobody else can see, each held against its checksum when it comes back."""

from __future__ import annotations

import errno
import hashlib
import os
import tempfile
import weakref
from pathlib import Path

import torch

from kvcache.errors import BadRequest
from kvcache.layout import KVLayout
from kvcache.tier_store import page_shape
from kvcache.types import PageId

__all__ = ["DiskStore"]


class DiskStore:
    """A file without a name, of this user only, which is gone with the process.

    Checksums are kept in memory: a page that was damaged, or never reached the disk, raises
    `OSError` (EIO), as a broken disk does. One page of memory stages the copies.
    """

    name = "disk"

    def __init__(self, layout: KVLayout, slots: int, folder: Path, *, pinned: bool = False) -> None:
        """Take the room for `slots` pages in `folder` at once.

        Raises `BadRequest` where there is no such folder, or not that much room in it.
        """
        self.slots = slots
        self._staging = torch.empty(page_shape(layout), dtype=torch.uint8, pin_memory=pinned)
        self._bytes = self._staging.numpy().data.cast("B")
        self._sums: dict[PageId, bytes] = {}
        size = slots * len(self._bytes)
        try:
            self.fd = _nameless_file(folder)
            self._close = weakref.finalize(self, os.close, self.fd)
            os.posix_fallocate(self.fd, 0, size)
        except OSError as error:
            why = f"{folder}: no room for {slots} pages ({size >> 20} MiB): {error.strerror}"
            raise BadRequest(why, param="disk_dir") from error

    def buffer(self, slot: PageId) -> torch.Tensor:
        return self._staging

    def flush(self, slot: PageId) -> None:
        self._sums.pop(slot, None)
        if os.pwrite(self.fd, self._bytes, self._at(slot)) < len(self._bytes):
            raise OSError(errno.ENOSPC, "a page was written in part")
        self._sums[slot] = self._sum()

    def fetch(self, slot: PageId) -> torch.Tensor:
        got = os.preadv(self.fd, [self._bytes], self._at(slot))
        if got < len(self._bytes) or self._sums.get(slot) != self._sum():
            raise OSError(errno.EIO, "a page is not what was written")
        return self._staging

    def close(self) -> None:
        self._close()

    def _at(self, slot: PageId) -> int:
        return (slot - 1) * len(self._bytes)

    def _sum(self) -> bytes:
        return hashlib.blake2b(self._bytes, digest_size=16).digest()


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
