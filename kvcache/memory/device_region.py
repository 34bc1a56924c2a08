"""Slots in host memory, and a pool in the memory of a device.

The kernel drops the write right of a sender that is killed, but copies that it had started on the
device may run on until the driver has torn down what it had there. So each slot's row also names
the process that may have copies in flight: it is stored once the lock is taken, and cleared when
all copies are complete, before the lock is dropped. Who finds a name there waits until nothing is
left of that process.
"""

from __future__ import annotations

from typing import ClassVar, Final, Self

import numpy as np
import numpy.typing as npt
import torch

from kvcache.errors import BadRequest
from kvcache.lease import NONCE, WORDS
from kvcache.memory.device import Allocation, Device
from kvcache.memory.layout import PoolLayout, SplitLayout
from kvcache.memory.processes import is_over, this_process
from kvcache.memory.region import RowLocks, SharedSlots
from kvcache.memory.write_rights import WriteRights

__all__ = ["DeviceRegion", "DeviceSlots"]

PID: Final = 0  # of the words behind the slot's: the process that may write; 0: none
STARTED: Final = 1  # when that process started


class DeviceSlots(SharedSlots):
    """The slots of a pool on a device, as its owner and its peers map them."""

    MAGIC: ClassVar[int] = 0x6D_69_63_72_6F_6B_76_33  # "microkv3"
    ROW: ClassVar[int] = 2 * WORDS  # with one cache line for the writer

    def _make_rights(self) -> WriteRights:
        self.writers = self.table[:, WORDS : WORDS + 2]
        rights = _MarkedRights(RowLocks(self.fd, self.ROW), self.writers)
        return WriteRights(rights.take, rights.drop)


class DeviceRegion(DeviceSlots):
    """A region with the pool on a device; made by `on`."""

    memory: torch.Tensor  # the pool's bytes, and a few behind them to round up
    handle: bytes  # by which peers map it
    pool: torch.Tensor
    _allocation: Allocation

    def __init__(self, fd: int, layout: PoolLayout) -> None:
        super().__init__(fd, layout)
        self.pool_fd = -1, 0

    @classmethod
    def on(cls, device: Device, layout: PoolLayout, epoch: int) -> Self:
        """Allocate the pool on `device`. Raises `BadRequest` if it does not fit there."""
        if isinstance(layout, SplitLayout):
            raise BadRequest("an engine on a GPU cannot be split over workers", param="device")
        allocation = device.allocate(layout.nbytes)
        region = cls.create(layout, epoch)
        region._allocation = allocation
        region.handle = allocation.handle
        region.memory = allocation.memory
        region.pool = layout.view(allocation.memory[: layout.nbytes].view(layout.dtype))
        return region

    def close(self) -> None:
        """Close the slots. Idempotent. The pool is freed with the last reference to it.

        No copy can begin any more. While a peer still copies, the pool is kept to the end of this
        process: freeing memory that another process writes is undefined.
        """
        self.slots[:, NONCE] = 0
        pid, _ = this_process()
        if any(writer not in (0, pid) for writer in self.writers[:, PID].tolist()):
            self._allocation.keep()
        super().close()


class _MarkedRights:
    """The rights of this process: a row's lock, with the name of its holder in the row.

    One process holds a right at a time, whether it shares it or not: there is room for one name.
    The workers of one claim in several processes take turns.
    """

    def __init__(self, locks: RowLocks, writers: npt.NDArray[np.uint64]) -> None:
        """`writers` is `[slots, 2]`."""
        self._locks, self._writers = locks, writers

    def take(self, slot: int, share: int) -> bool:
        if not self._locks.take(slot, 0):
            return False
        row, own = self._writers[slot], this_process()
        pid, started = int(row[PID]), int(row[STARTED])
        if pid and (pid, started) != own and not is_over(pid, started):
            self._locks.drop(slot)
            return False
        row[PID] = 0
        row[STARTED] = own[1]
        row[PID] = own[0]  # last: with it the name counts
        return True

    def drop(self, slot: int) -> None:
        self._writers[slot, PID] = 0
        self._locks.drop(slot)
