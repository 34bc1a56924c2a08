"""The sequences of one cache: which pages each has, and how many tokens are in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from kvcache.books import Books
from kvcache.errors import BadRange, Internal
from kvcache.layout import KVLayout
from kvcache.step import PagedSequence
from kvcache.types import PageId, SeqId

__all__ = ["SequenceTable"]


class SequenceTable:
    """What `KVCache` says of sequences is done here. The cache's lock guards it."""

    def __init__(self, books: Books, layout: KVLayout, pool: torch.Tensor) -> None:
        self._books = books
        self._size = layout.page_size
        self._layout = layout
        self._pool = pool
        self._all: dict[SeqId, PagedSequence] = {}

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, seq_id: SeqId) -> PagedSequence:
        try:
            return self._all[seq_id]
        except KeyError:
            raise Internal(f"there is no sequence {seq_id}") from None

    def check_new(self, seq_id: SeqId) -> None:
        """Raises `Internal` if there is such a sequence."""
        if seq_id in self._all:
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
        """Let go of a sequence's pages."""
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
        self._books.prefix.insert(tokens[: full * self._size], sequence.pages[:full])

    def holders(self) -> Iterator[Sequence[PageId]]:
        """The pages of each sequence, for the proof of ownership. Raises `Internal` if broken."""
        for sequence in self._all.values():
            if sequence.length > len(sequence.pages) * self._size:
                raise Internal("a sequence is longer than its pages")
            yield sequence.pages
