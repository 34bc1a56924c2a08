"""`Target`: the operations on a peer's region that differ between transports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from kvcache.memory import PoolLayout
from kvcache.transport.runs import Runs
from kvcache.types import SlotIndex

__all__ = ["HostTarget", "Target"]


class Target(Protocol):
    """A peer's region as a sender sees it.

    Calls return when their work is complete. All come from one thread, except `record_event`.
    """

    @property
    def layout(self) -> PoolLayout:
        """Layout of the peer's pool."""
        ...

    @property
    def commit_bytes(self) -> int:
        """The most bytes that are copied in one hold of the write right."""
        ...

    def try_acquire_right(self, slot: SlotIndex, share: int = 0) -> bool:
        """Take the write right of a slot if it is free; never wait for its holder.

        The right is exclusive with `share=0`, otherwise shared by all holders with the same
        `share`.
        """
        ...

    def release_right(self, slot: SlotIndex) -> None:
        """Release the write right. No write made under it is still in flight."""
        ...

    def words(self, slot: SlotIndex) -> npt.NDArray[np.uint64]:
        """Return the current words of the slot."""
        ...

    def store(self, slot: SlotIndex, words: Mapping[int, int]) -> None:
        """Write some of the slot's words. The caller holds the write right."""
        ...

    def record_event(self) -> object:
        """Record an event behind the work that the calling thread has started on the source pool's
        device. None where work completes synchronously, as on CPUs."""
        ...

    def event_done(self, event: object) -> bool:
        """Return whether the work before `event` has completed; never wait for it."""
        ...

    def copy(self, runs: Runs) -> None:
        """Copy runs of bytes from the source pool into the peer's. The caller holds the write
        right."""
        ...


class HostTarget:
    """What all `Target`s have in common whose source pool is in host memory."""

    commit_bytes: ClassVar[int] = 4 << 20  # some 0.3 ms in memory

    def record_event(self) -> None:
        return None

    def event_done(self, event: object) -> bool:
        return True
