"""The sequences of one cache: their block tables and their lengths in tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from kvcache.errors import BadRange, Internal, NoCapacity, Unsupported
from kvcache.pages import PageManager
from kvcache.sequences.away import HOLE, AwayBlock, check_holes, missing_pages
from kvcache.sequences.block_table import BlockTable
from kvcache.sequences.lent import LentPages, NothingLent
from kvcache.sequences.step import (
    PageCopy,
    PagedSequence,
    SendRange,
    Span,
    StepDescription,
    StepSend,
)
from kvcache.sequences.swapping import NoSwapSpace, SwappedSequence, SwapSpace
from kvcache.types import PageId, SeqId, TokenPos

__all__ = ["SequenceTable"]


class _OnDevice(dict[SeqId, PagedSequence]):
    """The sequences on the device. Raises `Internal` for one that is unknown or swapped out."""

    def __init__(self, swapped: Mapping[SeqId, SwappedSequence]) -> None:
        self._swapped = swapped

    def __missing__(self, seq_id: SeqId) -> PagedSequence:
        if seq_id in self._swapped:
            raise Internal(f"sequence {seq_id} is swapped out")
        raise Internal(f"there is no sequence {seq_id}")


class SequenceTable:
    """Sequences and their block tables. It touches no page: it describes steps and copies.

    A `SequenceCache` by itself. Not thread-safe: in `KVCache`, the cache's lock guards it.
    """

    def __init__(self, manager: PageManager, page_size: int) -> None:
        self.lock: AbstractContextManager[Any] = nullcontext()
        self.page_size = page_size
        self.swap_space: SwapSpace = NoSwapSpace()
        self.loans: LentPages = NothingLent()
        # Called for a block that lies with a creditor and that no sequence has any more.
        self.give_back: Callable[[AwayBlock], object] = lambda block: None
        self._manager = manager
        self._swapped: dict[SeqId, SwappedSequence] = {}
        self._all = _OnDevice(self._swapped)
        # Both hold references to the pages of their copies: a device may execute a copy after its
        # sequences have ended.
        self._copies: list[PageCopy] = []  # not yet handed out
        self._copying: list[PageCopy] = []  # handed out, not yet executed

    def __len__(self) -> int:
        """Number of sequences on the device."""
        return len(self._all)

    def __getitem__(self, seq_id: SeqId) -> PagedSequence:
        """A sequence on the device. Raises `Internal` if it is unknown or swapped out."""
        return self._all[seq_id]

    def find(self, seq_id: SeqId) -> PagedSequence | None:
        """Return a sequence on the device, or None."""
        return self._all.get(seq_id)

    def all(self) -> list[PagedSequence]:
        """Return the sequences on the device."""
        return list(self._all.values())

    def items(self) -> list[tuple[SeqId, PagedSequence]]:
        """Return the sequences on the device, with their ids."""
        return list(self._all.items())

    def check_new(self, seq_id: SeqId) -> None:
        """Raise `Internal` if the sequence exists."""
        if seq_id in self._all or seq_id in self._swapped:
            raise Internal(f"sequence {seq_id} exists")

    def put(self, seq_id: SeqId, pages: Sequence[PageId], length: int) -> None:
        """Add a sequence with pages that are held for it."""
        self.check_new(seq_id)
        self._all[seq_id] = PagedSequence(BlockTable(pages), length)

    def length(self, seq_id: SeqId) -> int:
        """Return the number of tokens whose KV the sequence has."""
        return self._all[seq_id].length

    def planned_length(self, seq_id: SeqId) -> int:
        """Return the length that the sequence has when all described steps have ended."""
        sequence = self._all[seq_id]
        return sequence.length + sequence.coming

    def add_sequence(self, seq_id: SeqId, tokens: Sequence[int] = ()) -> int:
        """Add a sequence with the longest cached prefix of `tokens`; return its length."""
        self.check_new(seq_id)
        pages = self._manager.prefix.match(tokens)
        length = len(pages) * self.page_size
        self.put(seq_id, self._manager.share(pages), length)
        return length

    def fork_sequence(self, parent: SeqId, child: SeqId, length: int) -> None:
        """See `KVCache.fork_sequence`. Describes the copy of a partial last page.

        Raises `Unsupported` if blocks among the shared ones lie with creditors.
        """
        self.check_new(child)
        source = self._all[parent]
        if not 0 <= length <= source.length:
            raise BadRange(f"cannot fork at {length} of {source.length} tokens")
        full, rest = divmod(length, self.page_size)
        if source.elsewhere and HOLE in source.table.pages(0, full + bool(rest)):
            raise Unsupported("blocks of the sequence are elsewhere, and are not shared")
        tail = self._manager.take(1) if rest else []
        pages = source.table.pages(0, full + len(tail))
        if tail:
            self.copy_page(pages.pop(), tail[0], rest)
        self.put(child, self._manager.share(pages) + tail, length)

    def remove_sequence(self, seq_id: SeqId) -> None:
        """Release a sequence's pages, or its slots in a tier."""
        swapped = self._swapped.pop(seq_id, None)
        if swapped is not None:
            swapped.abandon()
            self.swap_space.forget(swapped)
            return
        sequence = self._all[seq_id]
        self._manager.drop(sequence.pages)
        del self._all[seq_id]
        for _, block in sequence.away.items if sequence.away is not None else ():
            self.give_back(block)

    def pop(self, seq_id: SeqId, count: int) -> None:
        """See `KVCache.pop`."""
        sequence = self._all[seq_id]
        if not 0 <= count <= sequence.length:
            raise BadRange(f"cannot pop {count} of {sequence.length} tokens")
        length = sequence.length - count
        keep = self._pages_for(length)
        if sequence.elsewhere and HOLE in sequence.table.pages(length // self.page_size):
            raise Unsupported("cannot pop into blocks that are elsewhere")
        if length % self.page_size and self._manager.refs[sequence.table.ids[keep - 1]] > 1:
            # The partial page will be written again, and its other holders see it full.
            raise BadRange("cannot pop into a page that is shared")
        self._manager.drop(sequence.table.truncate(keep))
        sequence.length = length

    def grow(self, seq_id: SeqId, length: int, *, newcomer: bool = False) -> None:
        """See `KVCache.grow`."""
        sequence, pages = self._all[seq_id], -(-length // self.page_size)
        missing = max(pages - len(sequence.table), 0)
        lost = missing_pages(sequence.table, sequence.away, pages)
        if missing or lost:
            leaving = self._manager.reserved if newcomer else 0
            taken = self._manager.take(missing + len(lost), leaving=leaving)
            sequence.table.fill(lost, taken[: len(lost)])
            sequence.table.extend(taken[len(lost) :])

    def reserve(self, tokens: int) -> None:
        """See `KVCache.reserve`."""
        self._manager.reserved = self._pages_for(tokens)

    def lacking(self, tokens: int) -> int:
        """Return how many pages a sequence of `tokens` further tokens lacks; not above 0: none.

        All sequences on the device keep a page to grow into.
        """
        return self._pages_for(tokens) + len(self) - self._manager.available

    def call_back(self, tokens: int) -> None:
        """See `SequenceCache.call_back`."""
        if self.loans.lent:
            self.loans.call_back(max(self.lacking(tokens), 1))

    @property
    def awaits_pages(self) -> bool:
        """See `SequenceCache.awaits_pages`."""
        return self.loans.awaited > 0

    def publish(self, seq_id: SeqId, tokens: Sequence[int]) -> None:
        """See `KVCache.publish`."""
        sequence = self._all[seq_id]
        full = min(len(tokens), sequence.length) // self.page_size
        pages = sequence.table.pages(0, full)
        if sequence.elsewhere and HOLE in pages:
            pages = pages[: pages.index(HOLE)]
        self._manager.publish(tokens[: len(pages) * self.page_size], pages)

    def send(self, seq_id: SeqId, positions: SendRange | None) -> None:
        """Set the positions of a sequence that steps send; None: nothing further."""
        self._all[seq_id].send = positions

    def sending(self, seq_id: SeqId) -> SendRange | None:
        """Return the positions that steps send; None: none, or no such sequence on the device."""
        sequence = self._all.get(seq_id)
        return None if sequence is None else sequence.send

    # Steps

    def begin_step(self, seq_ids: Sequence[SeqId], counts: Sequence[int]) -> StepDescription:
        """Describe a step that computes `counts[i]` next tokens of `seq_ids[i]`, row after row.

        They follow those of the steps that have been described and have not ended. Raises
        `Internal` where no room has been made.
        """
        spans: list[Span] = []
        sends: list[StepSend] = []
        row = 0
        page_size = self.page_size
        for seq_id, count in zip(seq_ids, counts, strict=True):
            sequence = self._all[seq_id]
            start, table = TokenPos(sequence.length + sequence.coming), sequence.table
            end = TokenPos(start + count)
            if count < 1 or end > len(table) * page_size:
                raise Internal(f"no room for {count} tokens at {start} of a sequence")
            away: tuple[tuple[int, AwayBlock], ...] = ()
            if sequence.away is not None:
                away = self._away_before(sequence, start, end)
            send = sequence.send
            if send is not None and send.begin < end:
                last = min(end, send.end)
                sends.append(
                    StepSend(send.claim, len(spans), max(start, send.begin), last, landed=last)
                )
            spans.append(Span(row, start, count, table.ids, away))
            row += count
        for seq_id, count in zip(seq_ids, counts, strict=True):
            self._all[seq_id].coming += count
        copies, self._copies = self._copies, []
        self._copying += copies
        return StepDescription(tuple(seq_ids), tuple(spans), tuple(sends), tuple(copies))

    def finish_step(self, step: StepDescription) -> None:
        """Count the step's tokens as present. Steps end in the order of their descriptions."""
        for seq_id, span in zip(step.seq_ids, step.spans, strict=True):
            sequence = self._all.get(seq_id)
            if sequence is None:
                continue
            sequence.coming -= span.count
            if sequence.length == span.start:  # no earlier step of it failed
                sequence.advance(span.count)
        self.copied(step.copies)

    def abort_step(self, step: StepDescription) -> None:
        """Forget a step that failed; its tokens are not present.

        Later steps of the same sequences fail, too: what they follow is missing.
        """
        for seq_id, span in zip(step.seq_ids, step.spans, strict=True):
            if (sequence := self._all.get(seq_id)) is not None:
                sequence.coming -= span.count
        self.copied(step.copies)

    # Copies

    def copy_page(self, source: PageId, target: PageId, tokens: int) -> None:
        """Describe a copy, which `take_copies` or the next step hands out.

        Both pages are held until `copied`.
        """
        self._manager.share([source, target])
        self._copies.append(PageCopy(source, target, tokens))

    def take_copies(self) -> list[PageCopy]:
        """Hand out the copies that no step contains; call `copied` when they are executed."""
        copies, self._copies = self._copies, []
        self._copying += copies
        return copies

    def copied(self, copies: Sequence[PageCopy]) -> None:
        """Release the pages of copies that are done."""
        for copy in copies:
            self._copying.remove(copy)
            self._manager.drop([copy.source, copy.target])

    # Swapping

    def swap_out(self, seq_id: SeqId) -> Future[int]:
        """See `KVCache.swap_out`."""
        sequence = self._all[seq_id]
        if sequence.send is not None:
            raise Internal(f"sequence {seq_id} is swapped out while it is sent")
        if sequence.elsewhere:
            raise NoCapacity("blocks of the sequence are elsewhere; no tier has room for them")
        used = self._pages_for(sequence.length)
        swapped = self.swap_space.swap_out(sequence.table.pages(0, used), sequence.length)
        self._manager.drop(sequence.table.truncate(used))
        del self._all[seq_id]
        self._swapped[seq_id] = swapped
        return swapped.out

    def swap_in(self, seq_id: SeqId, length: int = 0) -> Future[int]:
        """See `KVCache.swap_in`."""
        swapped = self._swapped.get(seq_id)
        if swapped is None or swapped.moving:
            raise Internal(f"sequence {seq_id} is not swapped out")
        wanted = self._pages_for(max(length, swapped.length))

        def landed(pages: list[PageId], length: int) -> None:
            self.swap_space.forget(swapped)
            del self._swapped[seq_id]
            self.put(seq_id, pages, length)

        return swapped.copy_in(self._manager.take(wanted, leaving=len(self)), landed)

    def holders(self) -> Iterator[Sequence[PageId]]:
        """Yield the pages that sequences and copies hold, to prove ownership.

        Raises `Internal` if a sequence is longer than its pages, or its holes are not its blocks
        that are away.
        """
        for sequence in self._all.values():
            if sequence.present[-1][1] > len(sequence.table) * self.page_size:
                raise Internal("a sequence is longer than its pages")
            check_holes(sequence.table, sequence.away, sequence.present, self.page_size)
            yield sequence.pages
        for copy in (*self._copies, *self._copying):
            yield [copy.source, copy.target]

    def _away_before(
        self, sequence: PagedSequence, start: int, end: int
    ) -> tuple[tuple[int, AwayBlock], ...]:
        """Return the blocks away before `start`, for a step up to `end`.

        Raises `Internal` if the step's own tokens have no pages, or are present.
        """
        if sequence.beyond and end > sequence.beyond[0][0]:
            raise Internal(f"tokens before {end} of a sequence are present")
        if HOLE in sequence.table.pages(start // self.page_size, self._pages_for(end)):
            raise Internal(f"no pages for tokens {start} to {end} of a sequence")
        if sequence.away is None or not sequence.beyond:
            return sequence.away.items if sequence.away is not None else ()
        block = sequence.away.pages_per_block * self.page_size
        return tuple(item for item in sequence.away.items if item[0] * block < start)

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)
