"""The control block of receive leases: one slot of words per lease, in memory that peers can write.

Each word is written whole, by one aligned store:

- `nonce`: the lease that the slot serves; 0 when the lease is closed. Only the owner writes it.
- `claim`: the sender that may write; 0 before the first claim. The latest claim counts and fences
  off earlier ones.
- `landed`: the contiguous watermark, in tokens. It rises when all layers of a chunk are complete.
- `renewals`: counted up by the sender while it lives. The lease measures liveness with it.

**The write right.** A party changes a slot, or the pages behind it, only while it holds the slot's
lock, and rereads `nonce` and `claim` under the lock. The owner closes a lease by clearing `nonce`
and then only tries for the lock. If it gets the lock, no write is in flight and none can follow.
In shared memory the lock is an open-file-description lock on the slot's bytes: the kernel keeps it
for a stopped process and drops it for a killed one. The workers of one sender write under one claim
and share the right. The owner, and a sender that makes a claim, hold it alone.
"""

from __future__ import annotations

from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from kvcache.types import SlotIndex

__all__ = ["CLAIM", "LANDED", "NONCE", "RENEWALS", "SLOTS", "WORDS", "ControlSlots"]

NONCE: Final = 0
CLAIM: Final = 1
LANDED: Final = 2
RENEWALS: Final = 3
WORDS: Final = 8  # per slot: a cache line
SLOTS: Final = 1024  # leases that can be open at a time


class ControlSlots(Protocol):
    """The control words of one engine, in host memory, and the write rights over them."""

    slots: npt.NDArray[np.uint64]  # [SLOTS, WORDS]

    def try_acquire_right(self, slot: SlotIndex, share: int = 0) -> bool:
        """Acquire the write right of a slot and return True; return False if it is held.

        Never waits. With `share`, all parties that pass the same number hold the right together.
        """
        ...

    def release_right(self, slot: SlotIndex) -> None:
        """Release the write right of a slot."""
        ...
