"""A worker's view of its part of a split pool, which another process has allocated."""

from __future__ import annotations

import mmap
import os

import numpy as np
import numpy.typing as npt
import torch

from kvcache.errors import PeerUnreachable
from kvcache.lease import WORDS
from kvcache.memory.layout import PoolLayout, SplitLayout
from kvcache.memory.write_rights import WriteRights
from kvcache.types import SlotIndex

__all__ = ["PartRegion"]


class PartRegion:
    """One part of a pool, mapped into this process. Leases, and so slots, are the owner's."""

    def __init__(self, pid: int, fd: int, at: int, layout: SplitLayout, part: int) -> None:
        """Map the memory behind the descriptor `fd` of process `pid`.

        The pool begins at byte `at`. Raises `PeerUnreachable` if the process is gone.
        """
        try:
            own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise PeerUnreachable(f"the engine's memory cannot be opened: {error}") from error
        try:
            memory = mmap.mmap(own, at + layout.nbytes)
        finally:
            os.close(own)
        begin, own_layout = layout.parts[part]
        self.layout: PoolLayout = own_layout
        count = own_layout.nbytes // layout.dtype.itemsize
        flat = torch.frombuffer(memory, dtype=layout.dtype, count=count, offset=at + begin)
        self.pool = self.layout.view(flat)
        self.pool_fd = -1, 0
        self.slots: npt.NDArray[np.uint64] = np.zeros((0, WORDS), dtype=np.uint64)
        self._rights = WriteRights()

    def try_acquire_right(self, slot: SlotIndex, share: int = 0) -> bool:
        return self._rights.try_acquire_right(slot, share)

    def release_right(self, slot: SlotIndex) -> None:
        self._rights.release_right(slot)

    def close(self) -> None:
        pass
