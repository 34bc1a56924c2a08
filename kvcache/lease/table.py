"""Receive leases: which sender may write which pages, until when, and what follows.

    prep_recv ──► RESERVED ──► LANDED ──► start / commit: the pages go to a sequence or the tree
                     │            │
                     └────────────┴─────► release / expiry: the pages are free, or QUARANTINED
                                          until the write right proves that no put is in flight

`kvcache.lease.write_slots` closes the slot of a lease that ends, and quarantines its pages.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvcache.errors import LeaseExpired, UnknownLease
from kvcache.lease.control_slots import LANDED, NONCE, RENEWALS, ControlSlots
from kvcache.lease.write_slots import WriteSlots
from kvcache.types import LeaseId, PageId, SlotIndex

__all__ = ["LeaseTable", "ReceiveLease", "Watch"]

REMEMBERED = 4096  # ended leases that still answer lease_expired instead of unknown_lease


@dataclass(slots=True)
class ReceiveLease:
    """Room for the KV of `room` tokens: `tokens` and their continuation.

    The KV of the first `begin` was cached already.
    """

    lease_id: LeaseId
    request_id: str
    slot: SlotIndex
    nonce: int
    tokens: list[int]  # prompt[:end]
    room: int  # end and reserve
    begin: int  # match_len
    matched: list[PageId]  # pages of tokens[:begin], held, shared with the prefix cache
    own: list[PageId]  # pages from `begin` on, reserve included; peers write into them
    lease_s: float
    deadline: float  # on the cache's clock, seconds
    landed: int = field(default=0)  # as last read
    renewals: int = field(default=0)  # as last read

    @property
    def end(self) -> int:
        return len(self.tokens)

    @property
    def state(self) -> str:
        return "landed" if self.landed >= self.end else "reserved"


class Watch:
    """A reader of several leases' words, in one numpy operation and without the lock."""

    def __init__(self, slots: ControlSlots, leases: Sequence[ReceiveLease]) -> None:
        self._control = slots
        self._slots = np.array([lease.slot for lease in leases], dtype=np.intp)
        self._nonces = np.array([lease.nonce for lease in leases], dtype=np.uint64)
        self._begins = np.array([lease.begin for lease in leases], dtype=np.uint64)
        self._rooms = np.array([lease.room for lease in leases], dtype=np.uint64)

    def read(self) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.bool_]]:
        """Return the watermarks, and which leases are live; ignore the watermarks of others."""
        words = self._control.slots[self._slots]
        landed = np.maximum(np.minimum(words[:, LANDED], self._rooms), self._begins)
        return landed, words[:, NONCE] == self._nonces


class LeaseTable:
    """The live leases of one engine, and the pages in quarantine. The cache's lock guards it."""

    def __init__(self, slots: ControlSlots) -> None:
        self.slots = WriteSlots(slots)
        self._control = slots
        self._live: dict[LeaseId, ReceiveLease] = {}
        self._ended: dict[LeaseId, int | None] = {}  # what was committed, if it was

    def committed(self, lease_id: LeaseId) -> int | None:
        """Return the tokens published of a committed lease; None if it was not committed."""
        return self._ended.get(lease_id)

    def commit(self, lease: ReceiveLease, tokens: int) -> list[PageId]:
        """Take a lease over, and remember how many of its tokens are published."""
        own = self.take_over(lease)
        self._ended[lease.lease_id] = tokens
        return own

    def open(
        self,
        request_id: str,
        tokens: list[int],
        reserve: int,
        matched: list[PageId],
        begin: int,
        own: list[PageId],
        lease_s: float,
        now: float,
    ) -> ReceiveLease:
        """Open a lease over pages that the caller has taken. Raises `NoCapacity` without a slot."""
        slot, nonce = self.slots.open(begin)
        lease = ReceiveLease(
            lease_id=LeaseId(secrets.token_hex(8)),
            request_id=request_id,
            slot=slot,
            nonce=nonce,
            tokens=tokens,
            room=len(tokens) + reserve,
            begin=begin,
            matched=matched,
            own=own,
            lease_s=lease_s,
            deadline=now + lease_s,
            landed=begin,
        )
        self._live[lease.lease_id] = lease
        return lease

    def get(self, lease_id: LeaseId) -> ReceiveLease:
        """Return a live lease, its watermark reread. Raises `LeaseExpired` or `UnknownLease`."""
        lease = self._live.get(lease_id)
        if lease is None:
            if lease_id in self._ended:
                raise LeaseExpired(f"lease {lease_id} has ended", param="lease_id")
            raise UnknownLease(f"there is no lease {lease_id}", param="lease_id")
        # A put keeps it within these bounds; a faulty writer may not.
        landed = int(self._control.slots[lease.slot, LANDED])
        lease.landed = max(min(landed, lease.room), lease.begin)
        return lease

    def watch(self, leases: Sequence[ReceiveLease]) -> Watch:
        """Return a reader of these leases' watermarks."""
        return Watch(self._control, leases)

    def close(self, lease: ReceiveLease) -> list[PageId]:
        """End a lease: no write on its behalf can begin any more.

        Return its own pages if no put is in flight. Otherwise they go to quarantine, and a later
        `sweep` returns them. The caller drops the matched pages.
        """
        self._end(lease)
        return self.slots.close(lease.slot, lease.own)

    def take_over(self, lease: ReceiveLease) -> list[PageId]:
        """End a lease, and return its own pages for further use.

        Raises `KVIncomplete` if a put is in flight. The lease and the put are then unaffected.
        """
        self.slots.take_over(lease.slot)
        self._end(lease)
        return lease.own

    def expired(self, now: float) -> list[ReceiveLease]:
        """Return the leases past their deadline; extend those renewed since the last call."""
        late = []
        for lease in self._live.values():
            words = self._control.slots[lease.slot]
            renewals = int(words[RENEWALS])
            if renewals != lease.renewals:
                lease.renewals = renewals
                lease.deadline = now + lease.lease_s
            elif now > lease.deadline:
                late.append(lease)
        return late

    def sweep(self) -> list[PageId]:
        """Return the pages that have left quarantine."""
        return self.slots.sweep()

    @property
    def leased(self) -> int:
        """Pages that live leases own."""
        return sum(len(lease.own) for lease in self._live.values())

    @property
    def quarantined(self) -> int:
        """Pages in quarantine."""
        return self.slots.quarantined

    def live(self) -> list[ReceiveLease]:
        """Return the live leases, their watermarks reread."""
        return [self.get(lease_id) for lease_id in self._live]

    def holders(self) -> Iterator[list[PageId]]:
        """Yield the pages that leases and quarantine hold, to prove ownership."""
        for lease in self._live.values():
            yield lease.matched
            yield lease.own
        yield from self.slots.holders()

    def _end(self, lease: ReceiveLease) -> None:
        del self._live[lease.lease_id]
        self._ended[lease.lease_id] = None
        if len(self._ended) > REMEMBERED:
            del self._ended[next(iter(self._ended))]
