"""Receive leases: who may write where, until when, and what happens to the pages afterwards.

    prep_recv ──► RESERVED ──► LANDED ──► start / commit: the pages go to a sequence or the tree
                     │            │
                     └────────────┴─────► release / expiry: the pages are free, or QUARANTINED
                                          until the write right proves that no put is in flight

A lease that ends is closed in memory first (`nonce` cleared): every later write is refused, while
a write under way holds the slot's write right. Quarantine ends by that proof, never by time.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvcache.errors import KVIncomplete, LeaseExpired, NoCapacity, UnknownLease
from kvcache.lease.control_slots import CLAIM, LANDED, NONCE, RENEWALS, SLOTS, ControlSlots
from kvcache.types import LeaseId, PageId

__all__ = ["LeaseTable", "ReceiveLease", "Watch"]

REMEMBERED = 4096  # ended leases whose ids still answer lease_expired rather than unknown_lease


@dataclass(slots=True)
class ReceiveLease:
    """Room for the KV of `tokens` and of what will follow them, `room` tokens in all.

    The first `begin` were here already.
    """

    lease_id: LeaseId
    request_id: str
    slot: int
    nonce: int
    tokens: list[int]  # prompt[:end]
    room: int  # end and reserve
    begin: int  # match_len
    matched: list[PageId]  # pages of tokens[:begin], held, shared with the prefix cache
    own: list[PageId]  # pages from `begin` on, reserve included; peers write into them
    lease_s: float
    deadline: float  # on the clock that the caller of `sweep` reads
    landed: int = field(default=0)  # as last seen
    renewals: int = field(default=0)  # as last seen

    @property
    def end(self) -> int:
        return len(self.tokens)

    @property
    def state(self) -> str:
        return "landed" if self.landed >= self.end else "reserved"


class Watch:
    """Some leases as they stand in memory, all read in one operation; needs no lock."""

    def __init__(self, slots: ControlSlots, leases: Sequence[ReceiveLease]) -> None:
        self._control = slots
        self._slots = np.array([lease.slot for lease in leases], dtype=np.intp)
        self._nonces = np.array([lease.nonce for lease in leases], dtype=np.uint64)

    def read(self) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.bool_]]:
        """Watermarks, and which of the leases live; those of ended ones mean nothing."""
        words = self._control.slots[self._slots]
        return words[:, LANDED], words[:, NONCE] == self._nonces


class LeaseTable:
    """The live leases of one engine, and the pages in quarantine. The cache's lock guards it."""

    def __init__(self, slots: ControlSlots) -> None:
        self._control = slots
        self._slots = list(range(SLOTS - 1, -1, -1))
        self._live: dict[LeaseId, ReceiveLease] = {}
        self._ended: dict[LeaseId, int | None] = {}  # what was committed, if it was
        self._quarantine: list[tuple[int, list[PageId]]] = []

    def committed(self, lease_id: LeaseId) -> int | None:
        """How many tokens were published of a lease that was committed; None if it was not."""
        return self._ended.get(lease_id)

    def commit(self, lease: ReceiveLease, tokens: int) -> list[PageId]:
        """`take_over`, and remember how many tokens are published of it."""
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
        """A new lease over pages that the caller has taken. Raises `NoCapacity` without a slot."""
        if not self._slots:
            raise NoCapacity(f"{SLOTS} receive leases are open")
        slot = self._slots.pop()
        lease = ReceiveLease(
            lease_id=LeaseId(secrets.token_hex(8)),
            request_id=request_id,
            slot=slot,
            nonce=secrets.randbits(63) | 1,
            tokens=tokens,
            room=len(tokens) + reserve,
            begin=begin,
            matched=matched,
            own=own,
            lease_s=lease_s,
            deadline=now + lease_s,
            landed=begin,
        )
        words = self._control.slots[slot]
        words[CLAIM] = words[RENEWALS] = 0
        words[LANDED] = begin
        words[NONCE] = lease.nonce  # last: from here on a sender may claim
        self._live[lease.lease_id] = lease
        return lease

    def get(self, lease_id: LeaseId) -> ReceiveLease:
        """A live lease, its watermark reread. Raises `LeaseExpired` or `UnknownLease`."""
        lease = self._live.get(lease_id)
        if lease is None:
            if lease_id in self._ended:
                raise LeaseExpired(f"lease {lease_id} has ended", param="lease_id")
            raise UnknownLease(f"there is no lease {lease_id}", param="lease_id")
        # No sender of ours raises it further than there is room; none of another kind is believed.
        lease.landed = min(int(self._control.slots[lease.slot, LANDED]), lease.room)
        return lease

    def watch(self, leases: Sequence[ReceiveLease]) -> Watch:
        """Look at these leases again and again."""
        return Watch(self._control, leases)

    def close(self, lease: ReceiveLease) -> list[PageId]:
        """End a lease; no byte is written on its behalf from now on, but by a put under way.

        Returns its own pages if no put is under way; otherwise they are in quarantine and come out
        of `sweep` one day. The matched pages are the caller's to drop.
        """
        self._end(lease)
        if self._writer_is_gone(lease.slot):
            self._slots.append(lease.slot)
            return lease.own
        self._quarantine.append((lease.slot, lease.own))
        return []

    def take_over(self, lease: ReceiveLease) -> list[PageId]:
        """End a lease and go on using its own pages, which are returned. Raises `KVIncomplete` if a
        put is under way; the lease lives on then, and that put never notices."""
        if not self._control.try_right(lease.slot):
            raise KVIncomplete("a sender is still writing into this lease")
        try:
            self._end(lease)
        finally:
            self._control.drop_right(lease.slot)
        self._slots.append(lease.slot)
        return lease.own

    def expired(self, now: float) -> list[ReceiveLease]:
        """Leases whose time is up; a sign of life since the last look renews a lease instead."""
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
        """Pages that have come out of quarantine."""
        free: list[PageId] = []
        waiting = []
        for slot, pages in self._quarantine:
            if self._writer_is_gone(slot):
                self._slots.append(slot)
                free += pages
            else:
                waiting.append((slot, pages))
        self._quarantine = waiting
        return free

    @property
    def leased(self) -> int:
        """Pages that live leases own."""
        return sum(len(lease.own) for lease in self._live.values())

    @property
    def quarantined(self) -> int:
        """Pages in quarantine."""
        return sum(len(pages) for _, pages in self._quarantine)

    def live(self) -> list[ReceiveLease]:
        """The live leases, their watermarks reread."""
        return [self.get(lease_id) for lease_id in self._live]

    def holders(self) -> Iterator[list[PageId]]:
        """Every page that a lease or quarantine holds, for the proof of ownership."""
        for lease in self._live.values():
            yield lease.matched
            yield lease.own
        for _, pages in self._quarantine:
            yield pages

    def _end(self, lease: ReceiveLease) -> None:
        self._control.slots[lease.slot, NONCE] = 0
        del self._live[lease.lease_id]
        self._ended[lease.lease_id] = None
        if len(self._ended) > REMEMBERED:
            del self._ended[next(iter(self._ended))]

    def _writer_is_gone(self, slot: int) -> bool:
        """Whether no put into a closed slot is under way; none can begin any more."""
        if not self._control.try_right(slot):
            return False
        self._control.drop_right(slot)
        return True
