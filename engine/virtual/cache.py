"""The KV cache of a virtual engine: the real bookkeeping over pages that hold no memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from engine.protocol import BLOCK_TOKENS
from engine.scheduling import Chunk
from engine.virtual.loans import AtOnce
from engine.virtual.put import Puts, VirtualPut
from kvcache.bookkeeping import LOAN_S, Bookkeeping
from kvcache.borrowing import BlockMover, Borrowing, FetchCost
from kvcache.errors import Internal, NoCapacity
from kvcache.lease import SLOTS, WORDS, Identity, Mirror, PageSends, Put, ReceiveLease, Sender
from kvcache.lending import BlockSource
from kvcache.sequences import PageCopy, SendRange, StepDescription
from kvcache.types import LeaseId, SeqId, SlotIndex, TokenPos

__all__ = ["VirtualCache", "VirtualSlots"]


class VirtualSlots:
    """Control slots that one thread writes, so that nobody ever holds a write right."""

    def __init__(self) -> None:
        self.slots = np.zeros((SLOTS, WORDS), dtype=np.uint64)

    def try_acquire_right(self, slot: SlotIndex, share: int = 0) -> bool:
        return True

    def release_right(self, slot: SlotIndex) -> None:
        pass


class VirtualCache:
    """What a stepper and the calls of an engine use of `kvcache.cache.KVCache`.

    It has no tiers. Copies of pages take no time. Not thread-safe.
    """

    persistent = False

    def __init__(
        self,
        pages: int,
        page_size: int,
        slots: VirtualSlots,
        puts: Puts,
        identity: Identity,
        endpoint: str,
        clock: Callable[[], float],
        on_end: Callable[[], object],
        *,
        lend_pages: int = 0,
        loan_s: float = LOAN_S,
    ) -> None:
        """`pages` are those that can be used; the scratch page comes on top.

        `on_end` is called when leases have expired. At most `lend_pages` pages are lent at a time,
        each for `loan_s` seconds.
        """
        self._on_end, self._clock = on_end, clock
        self.elsewhere: Borrowing | None = None
        self.page_size = page_size
        self.lock: AbstractContextManager[Any] = nullcontext()
        self.bookkeeping = Bookkeeping(
            pages + 1, page_size, slots=slots, endpoint=lambda: endpoint,
            identity=identity, clock=clock, lend_pages=lend_pages, loan_s=loan_s,
        )  # fmt: skip
        self.sequences = sequences = self.bookkeeping.sequences
        self._receiver = receiver = self.bookkeeping.receiver
        self._sender = Sender(
            self.bookkeeping.pages, page_size, puts.layers, puts, identity, nullcontext()
        )
        self._layers = range(puts.layers)
        self.page_sends = PageSends(
            self._sender, self.bookkeeping.pages, page_size, puts.layers, nullcontext()
        )
        self._puts: dict[int, VirtualPut] = {}  # by claim
        self._step: StepDescription | None = None
        self._copies: list[PageCopy] = []  # of the decodes that have begun
        # The calls that bookkeeping answers as it is.
        self.add_sequence = sequences.add_sequence
        self.remove_sequence = sequences.remove_sequence
        self.grow = sequences.grow
        self.reserve = sequences.reserve
        self.call_back = sequences.call_back
        self.length = sequences.length
        self.planned_length = sequences.planned_length
        self.publish = sequences.publish
        self.swap_out = sequences.swap_out
        self.swap_in = sequences.swap_in
        self.leases = receiver.leases.live
        self.lease = receiver.leases.get
        self.extend = receiver.extend
        self.commit = receiver.commit
        self.release = receiver.release
        self.check_address = self._sender.check
        self.open_mirror = self._sender.mirror
        self.extend_mirror = self._sender.resume
        self.pause_mirror = self._sender.pause
        self.close_mirror = self._sender.close
        self.prefix = self.bookkeeping.pages.prefix
        self.check_room = self.bookkeeping.pages.check_room

    def borrow(self, source: BlockSource, cost: FetchCost) -> None:
        """See `KVCache.borrow`."""
        sender = self._sender
        mover = BlockMover(
            lambda address: sender.claim(address)[0], len(self._layers), self.page_size, AtOnce()
        )
        self.elsewhere = Borrowing(
            source, mover, self.sequences, self.bookkeeping.pages, self.bookkeeping.lender,
            self.lock, self.bookkeeping.landings, cost, self._clock, block_tokens=BLOCK_TOKENS,
        )  # fmt: skip
        self.bookkeeping.spare = BLOCK_TOKENS // self.page_size

    @property
    def awaits_pages(self) -> bool:
        """See `SequenceCache.awaits_pages`."""
        return self.sequences.awaits_pages

    def prep_recv(
        self, request_id: str, prompt: Sequence[int], end: int, reserve: int, lease_s: float
    ) -> tuple[ReceiveLease, str]:
        """See `KVCache.prep_recv`."""
        try:
            return self._receiver.prepare(request_id, prompt, end, reserve, lease_s)
        except NoCapacity:
            if self.sequences.lacking(end + reserve) > 0:
                self.sequences.call_back(end + reserve)
            raise

    def fork_sequence(self, parent: SeqId, child: SeqId, length: int) -> None:
        """See `SequenceCache.fork_sequence`."""
        self.sequences.fork_sequence(parent, child, length)
        self.sequences.copied(self.sequences.take_copies())

    def start_lease(
        self, lease_id: LeaseId, seq_id: SeqId, tokens: Sequence[int], begin: int | None
    ) -> int:
        """See `KVCache.start_lease`."""
        length = self._receiver.start(lease_id, seq_id, tokens, begin, fence=False)
        self.sequences.copied(self.sequences.take_copies())
        return length

    def sweep(self) -> list[ReceiveLease]:
        """See `StepCache.sweep`."""
        self.bookkeeping.lender.sweep()
        ended = self._receiver.sweep()
        if ended:
            self._on_end()
        return ended

    # Sending

    def open_put(self, kv_addr: str, prompt: Sequence[int], begin: int, end: int) -> VirtualPut:
        """See `KVCache.open_put`; never waits."""
        return self._own(self._sender.open(kv_addr, prompt, begin, end))

    def mark_send(self, seq_id: SeqId, put: Put, begin: int, end: int, /) -> None:
        """See `StepCache.mark_send`."""
        sequence = self.sequences[seq_id]
        self._puts[put.claim] = self._own(put)
        send = SendRange(put.claim, TokenPos(begin), TokenPos(end))
        self.sequences.send(seq_id, send)
        present = TokenPos(min(sequence.length, end))
        if send.begin < present:
            put.write(self._layers, sequence.table.ids, send.begin, present)
            put.signal(present)

    def clear_mark(self, seq_id: SeqId, /) -> None:
        """See `StepCache.clear_mark`."""
        if (send := self.sequences.sending(seq_id)) is not None:
            self._puts.pop(send.claim, None)
        self.sequences.send(seq_id, None)

    def mirror(self, seq_id: SeqId, mirror: Mirror, every: int) -> None:
        """See `KVCache.mirror`."""
        self._sender.advance(mirror, self.sequences[seq_id], every)

    # Steps

    def room_for(self, chunks: Sequence[Chunk], times: int) -> bool:
        """Say if a step has the pages to be computed `times` times, some of them by eviction.

        Nothing is evicted yet: whoever comes before these steps finds the prefixes.
        """
        if self.has_free(chunks, times):
            return True
        pages = self.bookkeeping.pages
        missing = self._wanted(chunks, times) - pages.pool.free
        return missing <= pages.prefix.evictable and pages.prefix.can_evict(missing)

    def has_free(self, chunks: Sequence[Chunk], times: int) -> bool:
        """Say if a step can be computed `times` times without eviction."""
        free = self.bookkeeping.pages.pool.free
        most = len(chunks) * -(-times // self.page_size)
        return most <= free or self._wanted(chunks, times) <= free

    def make_room(self, chunks: Sequence[Chunk], times: int) -> int:
        """Make free the pages that a step takes if it is computed `times` times.

        Evicts what these steps would evict one by one. Returns for how many of them there is room.
        """
        manager = self.bookkeeping.pages
        while times > 1 and not self.has_free(chunks, times):
            missing = self._wanted(chunks, times) - manager.pool.free
            if manager.prefix.evict(missing) == missing:
                break
            times -= 1
        return times

    def _wanted(self, chunks: Sequence[Chunk], times: int) -> int:
        """Return the pages that a step takes if it is computed `times` times."""
        size, wanted = self.page_size, 0
        for chunk in chunks:
            sequence = self.sequences[chunk.seq_id]
            wanted += max(0, -(-(sequence.length + times) // size) - len(sequence.table))
        return wanted

    def begin_decodes(self) -> None:
        """Begin equal steps of decodes. They send nothing, so that no step has to be described."""
        self._copies = self.sequences.take_copies()

    def begin_step(self, chunks: Sequence[Chunk], began: float, seconds: float) -> None:
        """Begin a step that takes `seconds`, and to send what it computes for sends."""
        self._step = step = self.sequences.begin_step(
            [chunk.seq_id for chunk in chunks], [len(chunk.tokens) for chunk in chunks]
        )
        for send in step.sends:
            put = self._puts.get(send.claim)
            if put is not None and send.begin < send.end:
                put.write_step(send.end - send.begin, began, seconds)
                put.signal(send.landed)

    def end_step(self, chunks: Sequence[Chunk], times: int) -> None:
        """Count the tokens of the step, or of `times` equal steps, as present."""
        if (step := self._step) is not None:
            self._step = None
            self.sequences.finish_step(step)
            return
        for chunk in chunks:
            sequence = self.sequences[chunk.seq_id]
            length = TokenPos(sequence.length + times)
            self.sequences.grow(chunk.seq_id, length)
            sequence.length = length
        self.sequences.copied(self._copies)
        self._copies = []

    def abort_step(self) -> None:
        """Forget the step, or the equal steps, that have failed: no token of them is present."""
        if (step := self._step) is not None:
            self._step = None
            self.sequences.abort_step(step)
        self.sequences.copied(self._copies)
        self._copies = []

    # Show

    @property
    def pages_in_use(self) -> int:
        """Pages that sequences, leases and pins hold, and that are in quarantine."""
        manager = self.bookkeeping.pages
        return manager.total - manager.available

    def check_integrity(self) -> None:
        """Check that every page is free or held. Raises `Internal` if one is not."""
        moving = self.elsewhere.holders() if self.elsewhere is not None else ()
        sent = (*self._sender.holders(), *self.page_sends.holders())
        self.bookkeeping.check([*sent, *moving])
        if self.elsewhere is not None:
            self.elsewhere.check()

    @staticmethod
    def _own(put: Put) -> VirtualPut:
        if not isinstance(put, VirtualPut):
            raise Internal("a put of another transport")
        return put
