"""The sequences of one cache: which pages each has, and how many tokens are in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future

import torch

from kvcache.errors import BadRange, Internal
from kvcache.memory.layout import KVLayout
from kvcache.pages.page_manager import PageManager
from kvcache.sequences.step import PagedSequence
from kvcache.tiers.hierarchy import Tiers
from kvcache.tiers.swap import Swap
from kvcache.types import PageId, SeqId

__all__ = ["SequenceTable"]


class SequenceTable:
    """What `KVCache` says of sequences is done here. The cache's lock guards it."""

    def __init__(
        self, books: PageManager, layout: KVLayout, pool: torch.Tensor, tiers: Tiers
    ) -> None:
        self._books = books
        self._tiers = tiers
        self._size = layout.page_size
        self._layout = layout
        self._pool = pool
        self._all: dict[SeqId, PagedSequence] = {}
        self._away: dict[SeqId, Swap] = {}

    def __len__(self) -> int:
        """Sequences on the device."""
        return len(self._all)

    def __getitem__(self, seq_id: SeqId) -> PagedSequence:
        """A sequence on the device. Raises `Internal` if there is none, as while it is swapped."""
        try:
            return self._all[seq_id]
        except KeyError:
            if seq_id in self._away:
                raise Internal(f"sequence {seq_id} is swapped out") from None
            raise Internal(f"there is no sequence {seq_id}") from None

    def check_new(self, seq_id: SeqId) -> None:
        """Raises `Internal` if there is such a sequence."""
        if seq_id in self._all or seq_id in self._away:
            raise Internal(f"sequence {seq_id} exists")

    def put(self, seq_id: SeqId, sequence: PagedSequence) -> None:
        """A new sequence, with pages that are held for it."""
        self.check_new(seq_id)
        self._all[seq_id] = sequence

    def add(self, seq_id: SeqId, tokens: Sequence[int]) -> int:
        """A new sequence with the longest cached prefix of `tokens`; returns its length."""
        self.check_new(seq_id)
        pages = self._books.prefix.match(tokens)
        length = len(pages) * self._size
        self.put(seq_id, PagedSequence(self._books.share(pages), length))
        return length

    def fork(self, parent: SeqId, child: SeqId, length: int) -> None:
        """See `KVCache.fork_sequence`."""
        self.check_new(child)
        source = self[parent]
        if not 0 <= length <= source.length:
            raise BadRange(f"cannot fork at {length} of {source.length} tokens")
        full, rest = divmod(length, self._size)
        tail = self._books.take(1) if rest else []
        if tail:
            self._pool[:, tail[0], :, :rest] = self._pool[:, source.pages[full], :, :rest]
        self.put(child, PagedSequence(self._books.share(source.pages[:full]) + tail, length))

    def remove(self, seq_id: SeqId) -> None:
        """Let go of a sequence's pages, or slots."""
        if seq_id in self._away:
            swap = self._away.pop(seq_id)
            swap.abandon()
            self._tiers.forget(swap)
            return
        self._books.drop(self[seq_id].pages)
        del self._all[seq_id]

    def pop(self, seq_id: SeqId, count: int) -> None:
        """See `KVCache.pop`."""
        sequence = self[seq_id]
        if not 0 <= count <= sequence.length:
            raise BadRange(f"cannot pop {count} of {sequence.length} tokens")
        length = sequence.length - count
        keep = self._layout.pages_for(length)
        if length % self._size and self._books.refs[sequence.pages[keep - 1]] > 1:
            # The partial page will be written again; others see it full.
            raise BadRange("cannot pop into a page that is shared")
        self._books.drop(sequence.pages[keep:])
        del sequence.pages[keep:]
        sequence.length = length

    def grow(self, seq_id: SeqId, length: int) -> None:
        """See `KVCache.grow`."""
        sequence = self[seq_id]
        missing = self._layout.pages_for(length) - len(sequence.pages)
        if missing > 0:
            sequence.pages += self._books.take(missing)

    def publish(self, seq_id: SeqId, tokens: Sequence[int]) -> None:
        """See `KVCache.publish`."""
        sequence = self[seq_id]
        full = min(len(tokens), sequence.length) // self._size
        self._books.publish(tokens[: full * self._size], sequence.pages[:full])

    def swap_out(self, seq_id: SeqId) -> Future[int]:
        """See `KVCache.swap_out`."""
        sequence = self[seq_id]
        if sequence.mark is not None:
            raise Internal(f"sequence {seq_id} is swapped out while it is sent")
        used = self._layout.pages_for(sequence.length)
        swap = self._tiers.swap_out(sequence.pages[:used], sequence.length)
        self._books.drop(sequence.pages[used:])
        del self._all[seq_id]
        self._away[seq_id] = swap
        return swap.out

    def swap_in(self, seq_id: SeqId, length: int) -> Future[int]:
        """See `KVCache.swap_in`."""
        swap = self._away.get(seq_id)
        if swap is None or swap.moving:
            raise Internal(f"sequence {seq_id} is not swapped out")
        wanted = self._layout.pages_for(max(length, swap.length))

        def landed(pages: list[PageId], length: int) -> None:
            self._tiers.forget(swap)
            del self._away[seq_id]
            self._all[seq_id] = PagedSequence(pages, length)

        return swap.back(self._books.take(wanted, leaving=len(self)), landed)

    def holders(self) -> Iterator[Sequence[PageId]]:
        """The pages of each sequence, for the proof of ownership. Raises `Internal` if broken."""
        for sequence in self._all.values():
            if sequence.length > len(sequence.pages) * self._size:
                raise Internal("a sequence is longer than its pages")
            yield sequence.pages
