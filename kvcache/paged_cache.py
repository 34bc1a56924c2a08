"""Sequences in pages, and the steps that compute them: the part of `KVCache` without peers."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager

import torch

from kvcache.errors import Internal, Unsupported
from kvcache.lease.put import Put
from kvcache.page_store.base import PageStore
from kvcache.sequences.step import PageCopy, SendRange, StepDescription
from kvcache.sequences.table import SequenceTable
from kvcache.types import SeqId, TokenPos

__all__ = ["PagedCache"]


class PagedCache:
    """The sequences of one engine: their declaration, and `attention` over them.

    `lock` guards the metadata; `kvcache.cache` says what it does not guard.
    """

    def __init__(self, store: PageStore, sequences: SequenceTable) -> None:
        """`sequences` describes steps and copies, and `store` executes them."""
        self.store = store
        self.lock = threading.RLock()
        self._sequences = sequences
        self._steps: deque[StepDescription] = deque()  # declared and not ended, oldest first
        # Copies that the device has yet to execute, oldest first, each with its event.
        self._copies: deque[tuple[object, list[PageCopy]]] = deque()

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.store.layout.page_size

    # Declare: sequences

    def add_sequence(self, seq_id: SeqId, tokens: Sequence[int] = ()) -> int:
        """Add a sequence with the longest cached prefix of `tokens`; return its length."""
        with self.lock:
            return self._sequences.add_sequence(seq_id, tokens)

    def fork_sequence(self, parent: SeqId, child: SeqId, length: int) -> None:
        """Add a sequence with the first `length` tokens of `parent`.

        It shares full pages and gets a copy of a partial last one. Raises `BadRange`, `NoCapacity`,
        and `Unsupported` if blocks among these tokens lie with creditors.
        """
        with self._copying(child):
            self._sequences.fork_sequence(parent, child, length)

    def remove_sequence(self, seq_id: SeqId) -> None:
        """Release a sequence's pages for immediate reuse. Close its put first, if it has one."""
        with self.lock:
            send = self._sequences.sending(seq_id)
            self._sequences.remove_sequence(seq_id)
            self._forget_put(send)

    def pop(self, seq_id: SeqId, count: int) -> None:
        """Forget the last `count` tokens of a sequence, and the pages that this leaves empty."""
        with self.lock:
            self._sequences.pop(seq_id, count)

    def grow(self, seq_id: SeqId, length: int, *, newcomer: bool = False) -> None:
        """Make room for `length` tokens. Raises `NoCapacity`, changing nothing.

        A `newcomer` gets no pages that are reserved for a waiting sequence.
        """
        with self.lock:
            self._sequences.grow(seq_id, length, newcomer=newcomer)

    def reserve(self, tokens: int) -> None:
        """Reserve the pages of `tokens` tokens for a sequence that waits for room; 0: none.

        New leases and newcomers leave so many available; otherwise a steady stream of them could
        keep the sequence waiting for ever. Replaces the earlier reservation.
        """
        with self.lock:
            self._sequences.reserve(tokens)

    def call_back(self, tokens: int) -> None:
        """Call back loans, because a sequence found no room for `tokens` further tokens.

        Debtors learn it from their next renewal. A loan that is called back is not renewed, so its
        pages are back within one lease time. Until then nothing else is lent.
        """
        with self.lock:
            self._sequences.call_back(tokens)

    @property
    def awaits_pages(self) -> bool:
        """Whether pages that were called back are still lent."""
        with self.lock:
            return self._sequences.awaits_pages

    def length(self, seq_id: SeqId) -> int:
        """Return the number of tokens whose KV the sequence has."""
        with self.lock:
            return self._sequences[seq_id].length

    def planned_length(self, seq_id: SeqId) -> int:
        """Return the length that the sequence has when all declared steps have ended."""
        with self.lock:
            return self._sequences.planned_length(seq_id)

    def publish(self, seq_id: SeqId, tokens: Sequence[int]) -> None:
        """Share the sequence's full pages through the prefix cache; `tokens` are its own."""
        with self.lock:
            self._sequences.publish(seq_id, tokens)

    def swap_out(self, seq_id: SeqId) -> Future[int]:
        """Move a sequence that is in no step to a tier; its pages are released when copied.

        Once the result is there, the sequence can be swapped in. It can be removed at any moment.
        All other calls on it raise `Internal`. The result is its length: less than before where the
        tier could not be written. Raises `NoCapacity`, changing nothing, if no tier has room.
        """
        with self.lock:
            return self._sequences.swap_out(seq_id)

    def swap_in(self, seq_id: SeqId, length: int = 0) -> Future[int]:
        """Bring a sequence back, with room for `length` tokens; it exists when the result is there.

        The result is its length: less than before where the tier could not be read. Raises
        `NoCapacity`, changing nothing, also if running sequences would lose their room to grow, and
        `Internal` for a sequence that is not swapped out.
        """
        with self.lock:
            return self._sequences.swap_in(seq_id, length)

    # Declare: sending

    def mark_send(self, seq_id: SeqId, put: Put, begin: int, end: int) -> None:
        """Send positions `[begin, end)` of a sequence.

        Those present are sent at once, all layers of a page together. The others are sent layer by
        layer as `attention` computes them. Raises `Unsupported` if blocks lie with creditors.
        """
        with self.lock:
            sequence = self._sequences[seq_id]
            self._forget_put(sequence.send)
            self.store.add_put(put)
            send = SendRange(put.claim, TokenPos(begin), TokenPos(end))
            if sequence.elsewhere:
                raise Unsupported("a sequence with blocks elsewhere cannot be sent")
            self._sequences.send(seq_id, send)
            present = TokenPos(min(sequence.length, end))
            if send.begin < present:
                self.store.send(put.claim, sequence.table.ids, send.begin, present)

    def clear_mark(self, seq_id: SeqId) -> None:
        """Send nothing further of a sequence."""
        with self.lock:
            self._forget_put(self._sequences.sending(seq_id))
            self._sequences.send(seq_id, None)

    # Compute

    def begin_forward(self, seq_ids: Sequence[SeqId], lengths: Sequence[int]) -> StepDescription:
        """Declare a step: `lengths[i]` further tokens of sequence `seq_ids[i]`, row after row.

        `grow` must have made room. The step's metadata is planned once for all layers. If the store
        executes several steps at a time, others may be declared before this one ends, also with
        further tokens of the same sequences. They end in the same order.
        """
        with self.lock:
            self._release_copied()
            step = self._sequences.begin_step(seq_ids, lengths)
            try:
                self.store.begin(step)
            except BaseException:
                self._sequences.abort_step(step)
                raise
            self._steps.append(step)
            return step

    def attention(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Append keys and values, send the marked rows, and attend.

        `q` is `[rows, heads, head_dim]`, `k` and `v` are `[rows, kv_heads, head_dim]`, after RoPE.
        Rows past the declared ones are padding. The result has the shape of `q`.
        """
        return self.store.attention(layer, q, k, v)

    def put(self, layer: int) -> None:
        """Send the marked rows of a layer as they are in the pages, without computing it."""
        self.store.put(layer)

    def end_forward(self) -> None:
        """Count the step's tokens as present, and raise the watermarks of those sent."""
        with self.lock:
            if not self._steps:
                raise Internal("end_forward without begin_forward")
            try:
                self._sequences.finish_step(self._steps.popleft())
            finally:
                self.store.end()

    def abort_forward(self) -> None:
        """Forget a step that failed; its tokens are not present.

        Later steps with tokens of the same sequences fail, too: what they follow is missing.
        """
        with self.lock:
            self.store.abort()
            if self._steps:
                self._sequences.abort_step(self._steps.popleft())

    @contextmanager
    def _copying(self, new: SeqId) -> Iterator[None]:
        """Hold the lock while sequence `new` is made; then execute the copies that fill its pages.

        They do not wait for the next step, because the pages may be sent or swapped before it. If
        they fail, the sequence is removed. The pages are held until the device has copied them.
        """
        with self.lock:
            yield
            copies = self._sequences.take_copies()
            if not copies:
                return
            try:
                event = self.store.copy(copies)
            except BaseException:
                self._sequences.remove_sequence(new)
                self._sequences.copied(copies)
                raise
            self._copies.append((event, copies))
            self._release_copied()

    def _release_copied(self) -> None:
        """Release the pages of copies that the device has executed."""
        while self._copies and self.store.event_done(self._copies[0][0]):
            self._sequences.copied(self._copies.popleft()[1])

    def _forget_put(self, send: SendRange | None) -> None:
        if send is not None:
            self.store.remove_put(send.claim)
