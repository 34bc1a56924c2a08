"""The part of a KV cache that a scheduler uses: sequences, their pages, and swapping."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any, Protocol

from kvcache.sequences.elsewhere import BlocksElsewhere
from kvcache.types import SeqId

__all__ = ["SequenceCache"]


class SequenceCache(Protocol):
    """The sequences of one cache. `kvcache.cache.KVCache` implements it."""

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        ...

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """Guards the metadata. Each method takes it; hold it to make several calls atomic."""
        ...

    @property
    def elsewhere(self) -> BlocksElsewhere | None:
        """The blocks that lie with creditors; None: this cache borrows nothing."""
        ...

    def add_sequence(self, seq_id: SeqId, tokens: Sequence[int] = ()) -> int:
        """Add a sequence with the longest cached prefix of `tokens`; return its length."""
        ...

    def fork_sequence(self, parent: SeqId, child: SeqId, length: int) -> None:
        """Add a sequence with the first `length` tokens of `parent`.

        Raises `BadRange`, `Unsupported` if blocks among these tokens lie with creditors, and
        `NoCapacity` if there is no page for a partial last one.
        """
        ...

    def remove_sequence(self, seq_id: SeqId) -> None:
        """Release a sequence's pages."""
        ...

    def grow(self, seq_id: SeqId, length: int, *, newcomer: bool = False) -> None:
        """Make room for `length` tokens. Raises `NoCapacity`, changing nothing.

        A `newcomer` gets no pages that are reserved for a waiting sequence.
        """
        ...

    def reserve(self, tokens: int) -> None:
        """Have new leases and sends leave pages for `tokens` tokens, which a sequence waits for."""
        ...

    def call_back(self, tokens: int) -> None:
        """Call back loans, because a sequence found no room for `tokens` further tokens.

        Loans past their deadline end at once. The others end within one lease time.
        """
        ...

    @property
    def awaits_pages(self) -> bool:
        """Whether pages that were called back are still lent."""
        ...

    def length(self, seq_id: SeqId) -> int:
        """Return the number of tokens whose KV the sequence has."""
        ...

    def planned_length(self, seq_id: SeqId) -> int:
        """Return the length that the sequence has when all steps under way have ended."""
        ...

    def publish(self, seq_id: SeqId, tokens: Sequence[int]) -> None:
        """Share the sequence's full pages through the prefix cache; `tokens` are its own."""
        ...

    def swap_out(self, seq_id: SeqId) -> Future[int]:
        """Move a sequence to a tier; the result is its length there, in tokens.

        Raises `NoCapacity`, changing nothing, if no tier has room.
        """
        ...

    def swap_in(self, seq_id: SeqId, length: int = 0) -> Future[int]:
        """Bring a sequence back with room for `length` tokens; the result is its length.

        Raises `NoCapacity`, changing nothing.
        """
        ...
