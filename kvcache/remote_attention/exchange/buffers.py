"""The two buffers of a connection: the queries of a layer, and the parts of its answer."""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from collections.abc import Sequence
from typing import Final

import torch

from kvcache.attention import PartialAttention, Ranges
from kvcache.errors import PeerUnreachable, TooLarge
from kvcache.remote_attention.exchange.shape import DTYPES, FLOAT32_BYTES, AttentionShape, Limits

__all__ = ["Buffers"]

SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Buffers:
    """Memory for one layer's queries, and behind it for its answer.

    Between processes of one host it is a memfd, which the creditor makes and the debtor maps. It is
    sealed, so that neither can take the memory from under the other. Between hosts each side has
    private memory. Only the pages that are used take memory. The creditor does not trust what is
    in a shared buffer: it is numbers, never a page id or a length.
    """

    def __init__(self, shape: AttentionShape, limits: Limits, fd: int = -1) -> None:
        """Map an open memfd and take over its descriptor; -1: use private memory.

        Raises `OSError` if it cannot be mapped; the descriptor is closed then too.
        """
        self._shape, self.fd = shape, fd
        at = -(-limits.rows * shape.query_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        size = at + -(-limits.reply_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if fd >= 0:
            self._close = weakref.finalize(self, os.close, fd)
            try:
                memory = mmap.mmap(fd, size)
            except BaseException:
                self._close()
                raise
        else:
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        view = memoryview(memory)
        self.query, self.reply = view[: limits.rows * shape.query_bytes], view[at:]
        self._queries = torch.frombuffer(self.query, dtype=DTYPES[shape.dtype]).view(
            limits.rows, shape.heads, shape.head_dim
        )
        self._reply = torch.frombuffer(
            self.reply, dtype=torch.float32, count=limits.reply_bytes // FLOAT32_BYTES
        )

    @classmethod
    def create(cls, shape: AttentionShape, limits: Limits) -> Buffers:
        """Make sealed memory that can be passed to another process."""
        fd = os.memfd_create("microserve-queries", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, _size(shape, limits))
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        except BaseException:
            os.close(fd)
            raise
        return cls(shape, limits, fd)

    @classmethod
    def attach(cls, shape: AttentionShape, limits: Limits, fd: int) -> Buffers:
        """Map the memory of a creditor, and take over its descriptor.

        Raises `PeerUnreachable` if it has another size, or could be taken away.
        """
        try:
            sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS == SEALS
            usable = sealed and os.fstat(fd).st_size == _size(shape, limits)
        except OSError as error:  # no memfd
            os.close(fd)
            raise PeerUnreachable(f"the creditor's buffers are no memory: {error}") from error
        if not usable:
            os.close(fd)
            raise PeerUnreachable("the creditor's buffers have another size")
        try:
            return cls(shape, limits, fd)
        except (OSError, ValueError) as error:  # it cannot be written, or is too large to be mapped
            raise PeerUnreachable(f"the creditor's buffers cannot be mapped: {error}") from error

    def close(self) -> None:
        """Close the descriptor. The mapping lives until the last tensor over it is gone."""
        if self.fd >= 0:
            self._close()

    def queries(self, rows: int) -> torch.Tensor:
        """Return the place of the first `rows` queries, `[rows, heads, head_dim]`."""
        return self._queries[:rows]

    def rows(self, ranges: Ranges, counts: Sequence[int]) -> tuple[PartialAttention, int]:
        """Return the place of an answer, as of `HeldPlan.attend_rows`, and its bytes.

        All `o` come first, then all `m`, then all `l`. `ranges` are the keys of the parts of each
        span, `counts` the rows of the spans. Raises `TooLarge` if they do not fit.
        """
        heads, dim = self._shape.heads, self._shape.head_dim
        rows = sum(count * len(parts) for parts, count in zip(ranges, counts, strict=True))
        total, values = rows * self._shape.part_floats, rows * heads * dim
        if total > len(self._reply):
            raise TooLarge(
                f"an answer of {total * FLOAT32_BYTES} bytes, "
                f"{len(self._reply) * FLOAT32_BYTES} at most"
            )
        place = PartialAttention(
            self._reply[:values].view(rows, heads, dim),
            self._reply[values : values + rows * heads].view(rows, heads),
            self._reply[values + rows * heads : total].view(rows, heads),
        )
        return place, total * FLOAT32_BYTES


def _size(shape: AttentionShape, limits: Limits) -> int:
    query = -(-limits.rows * shape.query_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    return query + -(-limits.reply_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
