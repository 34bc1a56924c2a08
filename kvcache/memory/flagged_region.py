"""Memory that peers on this host and on others can write, and the right that excludes both.

A slot's row has its words, then one flag per party. Party 0 is whoever on this host has the row's
lock: the owner, or a sender that maps this memory. The others are senders behind a network, which
has neither locks nor atomic operations. So a party takes the write right with loads and stores (as
in Dekker's algorithm): it raises its own flag, then reads all others. If another flag is raised, it
lowers its own and tries again later. Of two concurrent attempts at least one sees the other, so the
right is never held twice. No party waits for another. Parties that share a claim set their flags to
the claim and ignore each other's.

The flag of a party of this host that is killed stays raised until the next one takes the lock, or
`lower_stale` is called.
"""

from __future__ import annotations

import threading
from typing import ClassVar, Final

import numpy as np
import numpy.typing as npt

from kvcache.lease import WORDS
from kvcache.memory.layout import PoolLayout
from kvcache.memory.region import RowLocks, SharedRegion
from kvcache.memory.write_rights import WriteRights
from kvcache.types import SlotIndex

__all__ = ["EXCLUSIVE", "PARTIES", "ROW", "FlaggedRegion"]

THIS_HOST: Final = 0
PARTIES: Final = 120  # this host, and up to 119 senders on others
ROW: Final = WORDS + PARTIES  # 64-bit words of a slot's row
EXCLUSIVE: Final = 1  # flag of an exclusive holder; shared holders raise the number they share


class FlaggedRegion(SharedRegion):
    """A memfd whose slots have flags for senders on other hosts."""

    MAGIC: ClassVar[int] = 0x6D_69_63_72_6F_6B_76_32  # "microkv2"
    ROW: ClassVar[int] = ROW

    def __init__(self, fd: int, layout: PoolLayout) -> None:
        super().__init__(fd, layout)
        self.flags = self.table[:, WORDS:]
        # (address, bytes) of the table and the pool, for registration with a network.
        self.memory = [
            (self.table.ctypes.data, self.table.nbytes),
            (self.pool.data_ptr(), layout.nbytes),
        ]

    def lower_stale(self) -> None:
        """Lower the flags that killed senders of this host have left."""
        for slot in map(SlotIndex, np.flatnonzero(self.flags[:, THIS_HOST]).tolist()):
            if self.try_acquire_right(slot):
                self.release_right(slot)

    def _make_rights(self) -> WriteRights:
        flags = _Flags(RowLocks(self.fd, self.ROW), self.table[:, WORDS:])
        return WriteRights(flags.take, flags.drop)


class _Flags:
    """The right of this host's party: the row's lock, then the flag that senders elsewhere see."""

    def __init__(self, locks: RowLocks, flags: npt.NDArray[np.uint64]) -> None:
        """`flags` is `[slots, PARTIES]`."""
        self._locks, self._flags = locks, flags
        self._fence = threading.Lock()

    def take(self, slot: int, share: int) -> bool:
        if not self._locks.take(slot, share):
            return False
        row = self._flags[slot]
        row[THIS_HOST] = share or EXCLUSIVE
        with self._fence:  # a full memory barrier between the store above and the loads below
            pass
        others = row[THIS_HOST + 1 :]
        if ((others != 0) & (others != share)).any():
            self.drop(slot)
            return False
        return True

    def drop(self, slot: int) -> None:
        """Lower the flag, unless another process of this host shares the right, and unlock."""
        alone = self._locks.take(slot, 0)
        if not alone:
            # Of two that share and leave at the same time, the one that comes back last is alone.
            self._locks.drop(slot)
            alone = self._locks.take(slot, 0)
        if alone:
            self._flags[slot, THIS_HOST] = 0
            self._locks.drop(slot)
