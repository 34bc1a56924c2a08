"""What is in a file of pages that outlives its process: a record for each slot, before the pages.

    header, a block    magic, fingerprint, page size, bytes of a page, slots
    records            [slots]: check 8 | page 16 | before 16 | tokens [page_size] int32
    pages              [slots]

`page` is the page's own checksum, `before` the digest of all tokens before it: so pages find what
continues them. A record is blotted out before its slot is written and entered afterwards, so that
the file is right whenever its process is killed; where a machine dies, which has written some and
not others, the checksums tell what is right.
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kvcache.types import PageId

__all__ = ["BLOCK", "Found", "Ledger"]

BLOCK = 4096
CHECK = 8  # bytes of a record's own checksum
DIGEST = 16
# All of a prefix whose last page no other continues, and its slots.
Found = tuple[npt.NDArray[np.int32], list[PageId]]


class Ledger:
    """The records of the file `fd`, the first `size` bytes of it. One thread at a time."""

    def __init__(
        self, fd: int, *, slots: int, page_size: int, page_bytes: int, fingerprint: str
    ) -> None:
        """Of a file that is of something else, or new, nothing is found."""
        self._fd = fd
        self._slots = slots
        self._page_size = page_size
        self._record = CHECK + 2 * DIGEST + 4 * page_size
        self.size = BLOCK * (1 + -(-slots * self._record // BLOCK))
        about = f"microserve kv 1 {fingerprint} {page_size} {page_bytes} {slots}\n"
        self._header = about.encode().ljust(BLOCK, b"\0")
        self.known = os.pread(fd, BLOCK, 0) == self._header
        self._blank = bytes(self._record)

    def begin(self) -> None:
        """Of an empty file, say what it is of."""
        os.pwrite(self._fd, self._header, 0)

    def blot(self, slot: PageId) -> None:
        """Nothing is in `slot`. Raises `OSError`."""
        os.pwrite(self._fd, self._blank, self._at(slot))

    def enter(self, slot: PageId, prefix: npt.NDArray[np.int32], page: bytes) -> None:
        """The last page of `prefix`, full pages all, is in `slot`; `page` is its checksum.

        Raises `OSError`.
        """
        own = len(prefix) - self._page_size
        body = page + _digest(prefix[:own].tobytes()) + prefix[own:].tobytes()
        os.pwrite(self._fd, _check(body) + body, self._at(slot))

    def find(self) -> tuple[list[Found], dict[PageId, bytes]]:
        """The prefixes that are there whole, and the checksums of their pages, which are not read.

        A page whose beginning is gone is not found. Raises `OSError`.
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
            slot = after[before].setdefault(tokens, PageId(index + 1))  # once is enough
            pages.setdefault(slot, page)
        found = [(np.frombuffer(tokens, dtype=np.int32), slots) for tokens, slots in _paths(after)]
        used = {slot for _, slots in found for slot in slots}
        return found, {slot: page for slot, page in pages.items() if slot in used}

    def _at(self, slot: PageId) -> int:
        return BLOCK + (slot - 1) * self._record


def _paths(after: dict[bytes, dict[bytes, PageId]]) -> Iterator[tuple[bytes, list[PageId]]]:
    """From the beginning to each page that nothing continues."""
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
