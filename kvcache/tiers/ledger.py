"""Records of a persistent page file: one for each slot, stored before the pages.

    header, one block  magic, fingerprint, page size, bytes of a page, slots
    records            [slots]: check 8 | page 16 | before 16 | tokens [page_size] int32
    pages              [slots]

`check` is the record's checksum, `page` the page's. `before` is the digest of all tokens before the
page, which links pages to the pages that continue them. A record is erased before its slot is
written, and written afterwards, so the file is consistent whenever its process is killed. After a
crash of the machine, which may have stored some writes and not others, the checksums identify the
valid records and pages.
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kvcache.types import PageId

__all__ = ["BLOCK", "Ledger", "StoredPrefix"]

BLOCK = 4096
CHECK = 8  # bytes of a record's checksum
DIGEST = 16  # bytes of a digest
# The tokens of a prefix that no other stored page continues, and its slots.
StoredPrefix = tuple[npt.NDArray[np.int32], list[PageId]]


class Ledger:
    """The records of the file `fd`, in its first `size` bytes. Not thread-safe."""

    def __init__(
        self, fd: int, *, slots: int, page_size: int, page_bytes: int, fingerprint: str
    ) -> None:
        """Read the header. `matches` is False for a new file, and for other pages than these."""
        self._fd = fd
        self._slots = slots
        self._page_size = page_size
        self._record = CHECK + 2 * DIGEST + 4 * page_size
        self.size = BLOCK * (1 + -(-slots * self._record // BLOCK))
        header = f"microserve kv 1 {fingerprint} {page_size} {page_bytes} {slots}\n"
        self._header = header.encode().ljust(BLOCK, b"\0")
        self.matches = os.pread(fd, BLOCK, 0) == self._header
        self._blank = bytes(self._record)

    def write_header(self) -> None:
        """Write the header of a new file. Raises: `OSError`."""
        os.pwrite(self._fd, self._header, 0)

    def erase(self, slot: PageId) -> None:
        """Erase the record of `slot`. Raises: `OSError`."""
        os.pwrite(self._fd, self._blank, self._at(slot))

    def write(self, slot: PageId, prefix: npt.NDArray[np.int32], page: bytes) -> None:
        """Record that `slot` holds the last page of `prefix`; `page` is the page's checksum.

        The length of `prefix` is a multiple of the page size. Raises: `OSError`.
        """
        own = len(prefix) - self._page_size
        body = page + _digest(prefix[:own].tobytes()) + prefix[own:].tobytes()
        os.pwrite(self._fd, _check(body) + body, self._at(slot))

    def load(self) -> tuple[list[StoredPrefix], dict[PageId, bytes]]:
        """Return the complete prefixes and the checksums of their pages; do not read the pages.

        Pages without all their predecessors are left out. Raises: `OSError`.
        """
        records = os.pread(self._fd, self._slots * self._record, BLOCK)
        after: defaultdict[bytes, dict[bytes, PageId]] = defaultdict(dict)
        pages: dict[PageId, bytes] = {}
        for index in range(len(records) // self._record):
            record = records[index * self._record :][: self._record]
            check, body = record[:CHECK], record[CHECK:]
            if record == self._blank or check != _check(body):
                continue
            page, before, tokens = body[:DIGEST], body[DIGEST : 2 * DIGEST], body[2 * DIGEST :]
            slot = after[before].setdefault(tokens, PageId(index + 1))  # skips duplicates
            pages.setdefault(slot, page)
        prefixes = [
            (np.frombuffer(tokens, dtype=np.int32), slots) for tokens, slots in _paths(after)
        ]
        used = {slot for _, slots in prefixes for slot in slots}
        return prefixes, {slot: page for slot, page in pages.items() if slot in used}

    def _at(self, slot: PageId) -> int:
        return BLOCK + (slot - 1) * self._record


def _paths(after: dict[bytes, dict[bytes, PageId]]) -> Iterator[tuple[bytes, list[PageId]]]:
    """Yield the tokens and slots from the first page to each page that no other continues."""
    paths: list[tuple[bytes, list[PageId]]] = [(b"", [])]
    while paths:
        tokens, slots = paths.pop()
        following = after.get(_digest(tokens), {})
        paths += [(tokens + page, [*slots, slot]) for page, slot in following.items()]
        if slots and not following:
            yield tokens, slots


def _digest(tokens: bytes) -> bytes:
    return hashlib.blake2b(tokens, digest_size=DIGEST).digest()


def _check(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=CHECK).digest()
