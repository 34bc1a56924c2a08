"""The receiving side: leases from `prep_recv` until they start, are committed or end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from kvcache.errors import (
    BadAddress,
    BadRange,
    BadRequest,
    KVIncomplete,
    NoCapacity,
    StaleEpoch,
)
from kvcache.lease.address import KVAddress, page_runs, prompt_digest
from kvcache.lease.control_slots import ControlSlots
from kvcache.lease.identity import Identity
from kvcache.lease.table import LeaseTable, ReceiveLease
from kvcache.shard import Shard
from kvcache.types import LeaseId, PageId, SeqId, SlotIndex

__all__ = ["LeasablePages", "LeaseReceiver", "LeaseSequences"]

STALL_S = 1.0  # after a longer gap between sweeps, this process was stopped or starved


class LeasablePages(Protocol):
    """The pages of a pool. `kvcache.pages.PageManager` implements it; so may any other pool."""

    reserved: int  # pages that newcomers leave available

    @property
    def total(self) -> int: ...
    @property
    def available(self) -> int:
        """An upper bound of the pages that `take` can get."""
        ...

    def match(self, tokens: Sequence[int]) -> list[PageId]:
        """Return the pages of the longest prefix of `tokens` in the prefix cache."""
        ...

    def take(self, count: int) -> list[PageId]:
        """Take `count` pages, one reference each. Raises `NoCapacity`, changing nothing."""
        ...

    def share(self, pages: Sequence[PageId]) -> list[PageId]:
        """Add a reference to each of `pages`; return a copy of the list."""
        ...

    def drop(self, pages: Sequence[PageId]) -> None:
        """Drop a reference to each of `pages`."""
        ...

    def publish(self, tokens: Sequence[int], pages: Sequence[PageId]) -> None:
        """Enter full pages into the prefix cache."""
        ...


class LeaseSequences(Protocol):
    """What takes over the pages of a lease that starts. `SequenceTable` implements it."""

    @property
    def page_size(self) -> int: ...
    def __len__(self) -> int:
        """Sequences that may grow by a page at any time."""
        ...

    def check_new(self, seq_id: SeqId) -> None:
        """Raise `Internal` if the sequence exists."""
        ...

    def put(self, seq_id: SeqId, pages: list[PageId], length: int) -> None:
        """Add a sequence that owns the references to `pages` and has `length` tokens."""
        ...

    def copy_page(self, source: PageId, target: PageId, rows: int) -> None:
        """Copy the first `rows` tokens of a page into another."""
        ...


class LeaseReceiver:
    """The receive leases of one cache, from `prep_recv` on. The cache's lock guards it."""

    def __init__(
        self,
        manager: LeasablePages,
        sequences: LeaseSequences,
        slots: ControlSlots,
        endpoint: Callable[[], str],
        shards: tuple[Shard, ...],
        identity: Identity,
        clock: Callable[[], float],
    ) -> None:
        """`endpoint` and `shards` go into addresses; `clock` counts seconds, monotonically."""
        self.leases = LeaseTable(slots)
        self._manager = manager
        self._sequences = sequences
        self.page_size = sequences.page_size
        self._endpoint = endpoint
        self._shards = shards
        self._identity = identity
        self._clock = clock
        self._swept = clock()

    def prepare(
        self, request_id: str, prompt: Sequence[int], end: int, reserve: int, lease_s: float
    ) -> tuple[ReceiveLease, str]:
        """See `KVCache.prep_recv`."""
        tokens = list(prompt[:end])
        matched = self._manager.match(tokens)
        begin = len(matched) * self.page_size
        wanted = self._pages_for(end + reserve) - len(matched)
        self._admit(wanted, wanted, "end")
        matched = self._manager.share(matched)
        try:
            # After sharing: taking pages cannot evict the matched ones then.
            own = self._take(wanted, leaving=self._manager.reserved)
            try:
                lease = self.leases.open(
                    request_id, tokens, reserve, matched, begin, own, lease_s, self._clock()
                )
            except NoCapacity:
                self._manager.drop(own)
                raise
        except NoCapacity:
            self._manager.drop(matched)
            raise
        return lease, self._address(lease)

    def extend(self, kv_addr: str, reserve: int) -> tuple[ReceiveLease, str]:
        """See `KVCache.extend`."""
        address, identity = KVAddress.verify(kv_addr, self._identity.secret), self._identity
        if address.engine_id != identity.engine_id:
            raise BadAddress("kv_addr is for another engine", param="kv_addr")
        if address.epoch != identity.epoch:
            raise StaleEpoch("this engine was restarted since the address was made")
        lease = self.leases.get(address.lease_id)
        pages = self._pages_for(lease.room + reserve) - len(lease.matched)
        wanted = pages - len(lease.own)
        self._admit(wanted, pages, "reserve")
        lease.own += self._take(wanted)
        lease.room += reserve
        return lease, self._address(lease)

    def start(
        self,
        lease_id: LeaseId,
        seq_id: SeqId,
        tokens: Sequence[int],
        begin: int | None,
        *,
        fence: bool,
    ) -> int:
        """See `KVCache.start_lease`."""
        self._sequences.check_new(seq_id)
        lease = self.leases.get(lease_id)
        if list(tokens[: lease.end]) != lease.tokens:
            raise BadRequest("the lease is for another prompt", param="lease_id")
        length = lease.landed if begin is None else begin
        if not 0 <= length <= lease.room:
            raise BadRange(f"begin {length} is outside [0, {lease.room}]", param="begin")
        if length > lease.landed:
            raise KVIncomplete(f"begin is {length}, but {lease.landed} tokens have landed")
        own = self._fenced(lease) if fence else self.leases.take_over(lease)
        matched = lease.matched
        length = max(length, lease.begin)
        if lease.begin < len(tokens):
            length = min(length, len(tokens) - 1)
        else:
            # Everything is matched. The last page is shared, so it must not be written.
            matched, shared = matched[:-1], matched[-1:]
            self._manager.drop(shared)
            length = len(matched) * self.page_size
        self._sequences.put(seq_id, matched + own, length)
        return length

    def commit(self, lease_id: LeaseId) -> int:
        """See `KVCache.commit`."""
        before = self.leases.committed(lease_id)
        if before is not None:
            return before
        lease = self.leases.get(lease_id)
        if lease.landed < lease.end:
            raise KVIncomplete(f"{lease.landed} of {lease.end} tokens have landed")
        full = lease.end // self.page_size
        tokens = full * self.page_size
        pages = lease.matched + self.leases.commit(lease, tokens)
        self._manager.publish(lease.tokens[:tokens], pages[:full])
        self._manager.drop(pages)
        return tokens

    def release(self, lease_id: LeaseId) -> None:
        """See `KVCache.release`."""
        self._end(self.leases.get(lease_id))

    def sweep(self) -> list[ReceiveLease]:
        """See `KVCache.sweep`."""
        now = self._clock()
        gap, self._swept = now - self._swept, now
        if gap > STALL_S:
            for lease in self.leases.live():
                # Something of each gap counts: on a starved host, every gap may be long.
                counts = min(STALL_S, lease.lease_s / 4)
                lease.deadline = min(lease.deadline + gap - counts, now + lease.lease_s)
        late = self.leases.expired(now)
        for lease in late:
            self._end(lease)
        self._manager.drop(self.leases.sweep())
        return late

    def holders(self) -> Iterator[Sequence[PageId]]:
        """Yield the pages that leases and quarantine hold, to prove ownership."""
        return self.leases.holders()

    def _admit(self, wanted: int, pages: int, param: str) -> None:
        """Check that a lease may take `wanted` more pages and have `pages` of its own then.

        Raises `BadRequest` if it never may, `NoCapacity` if it may not now.
        """
        limit = self._manager.total // 2
        if pages > limit:
            raise BadRequest(
                f"{pages} pages are wanted; a lease may take {limit}",
                param=param,
                code="exceeds_pool",
            )
        held = self.leases.leased + self.leases.quarantined
        if held + wanted > limit:
            raise NoCapacity(f"{wanted} pages wanted; leases hold {held} of at most {limit}")

    def _take(self, count: int, *, leaving: int = 0) -> list[PageId]:
        """Take pages for a lease if every running sequence keeps one to grow into.

        `leaving` more have to stay available. Raises `NoCapacity` otherwise.
        """
        if self._manager.available < count + leaving + len(self._sequences):
            raise NoCapacity(f"{count} pages wanted, {self._manager.available} available")
        return self._manager.take(count)

    def address(
        self,
        lease_id: LeaseId,
        slot: SlotIndex,
        nonce: int,
        pages: Sequence[PageId],
        *,
        begin: int = 0,
        room: int,
        tokens: Sequence[int] = (),
    ) -> str:
        """Return the signed address of pages of this pool whose writer holds a control slot.

        `pages` are for positions `begin` to `room`. The prompt of a lease is `tokens`. Without
        tokens, any sequence can be written up to `room`.
        """
        identity = self._identity
        return KVAddress(
            engine_id=identity.engine_id,
            epoch=identity.epoch,
            url=identity.url,
            endpoint=self._endpoint(),
            lease_id=lease_id,
            slot=slot,
            nonce=nonce,
            begin=begin,
            end=len(tokens),
            room=room,
            runs=page_runs(pages),
            fingerprint=identity.fingerprint,
            digest=prompt_digest(tokens),
            shards=self._shards,
        ).sign(identity.secret)

    def _address(self, lease: ReceiveLease) -> str:
        return self.address(
            lease.lease_id, lease.slot, lease.nonce, lease.own,
            begin=lease.begin, room=lease.room, tokens=lease.tokens,
        )  # fmt: skip

    def _fenced(self, lease: ReceiveLease) -> list[PageId]:
        """End a lease; return pages with what has landed, which no writer can reach."""
        safe, rest = divmod(lease.landed - lease.begin, self.page_size)
        fresh = self._manager.take(len(lease.own) - safe)
        if rest:
            self._sequences.copy_page(lease.own[safe], fresh[0], rest)
        kept, lease.own = lease.own[:safe], lease.own[safe:]
        self._manager.drop(self.leases.close(lease))
        return kept + fresh

    def _end(self, lease: ReceiveLease) -> None:
        self._manager.drop(self.leases.close(lease))
        self._manager.drop(lease.matched)

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)
