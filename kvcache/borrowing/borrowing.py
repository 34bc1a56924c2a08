"""The blocks of long sequences that lie with creditors: moved there, given back, and lost.

local ── put ──► landed ── settle ──► away ── lost or called back ──► computed again
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

from kvcache.borrowing.answer_limits import AnswerLimits
from kvcache.borrowing.gaps import is_present, is_within, lose_block, reach
from kvcache.borrowing.move import Move
from kvcache.borrowing.mover import BlockMover
from kvcache.errors import BadRequest, NoCapacity
from kvcache.lending import BlockSource, BorrowedBlock
from kvcache.pages import PageManager
from kvcache.remote_attention import CreditorFailed
from kvcache.sequences import HOLE, AwayBlock, AwayBlocks, Loss, PagedSequence, SequenceTable
from kvcache.types import EngineId, LeaseId, PageId, SeqId

__all__ = ["Borrowing"]

log = logging.getLogger(__name__)

LEAST_BLOCKS = 3  # of a pool: one is on its way, one is computed, and others need room too
REFUSALS = 3  # in a row, after which a creditor counts as lost


class Borrowing:
    """Implements `BlocksElsewhere` for one cache.

    A block is let go only when its put has drained, and between two steps. Until then its sequence
    is as it was. The cache's lock guards the sequences; what the source tells is noted, and takes
    effect on the thread that steps.
    """

    def __init__(
        self,
        source: BlockSource,
        mover: BlockMover,
        sequences: SequenceTable,
        manager: PageManager,
        lock: AbstractContextManager[Any],
        *,
        block_tokens: int,
        limits: AnswerLimits,
    ) -> None:
        """Listen to the source. `lock` is the cache's, and `block_tokens` the tokens of a block.

        Raises `BadRequest` for a pool of fewer than three blocks.
        """
        self.wake: Callable[[], object] = lambda: None
        self.moved = 0
        self.block_tokens = block_tokens
        self._per_block = block_tokens // sequences.page_size
        self.total_pages = manager.total
        if self.total_pages < LEAST_BLOCKS * self._per_block:
            raise BadRequest(
                f"an engine that borrows needs {LEAST_BLOCKS * self._per_block} pages of its own"
            )
        self._source = source
        self._mover = mover
        self._limits = limits
        self._sequences = sequences
        self._manager = manager
        self._lock = lock
        self._page_size = sequences.page_size
        self._moves: list[Move] = []
        self._over: deque[tuple[EngineId, frozenset[LeaseId]]] = deque()  # as the source tells
        self._wanted = 0
        sequences.give_back = self._give_back
        source.on_ready = self._wake
        source.on_lost = source.on_called_back = self._end_soon

    # Moving

    def settle(self) -> int:
        """See `BlocksElsewhere`. Blocks that did not arrive are given back."""
        arrived = 0
        with self._lock:
            for move in [move for move in self._moves if move.ended]:
                self._moves.remove(move)
                if self._can_let_go(move):
                    arrived += 1
                    self._let_go(move)
                else:
                    self._manager.drop(move.pages)
                    self._give_back(move.block)
                    if isinstance(move.failure, Exception):
                        log.info("a block was not moved: %s", move.failure)
        self.moved += arrived
        return arrived

    def want(self, blocks: int) -> None:
        """See `BlocksElsewhere`."""
        if blocks != self._wanted:
            self._wanted = blocks
            self._source.want(blocks)

    def move_oldest(self, seq_id: SeqId, tokens: Sequence[int]) -> bool:
        """See `BlocksElsewhere`."""
        with self._lock:
            sequence = self._sequences[seq_id]
            number = next(self._movable(sequence), None)
            if number is None:
                return False
            block = self._source.take()
            if block is None:
                return False
            self._wanted = max(self._wanted - 1, 0)  # as the source counts
            if len(block.pages) != self._per_block:
                log.error("a block of %s has %d pages", block.creditor, len(block.pages))
                self._give_back(block)
                return False
            first = number * self._per_block
            pages = self._manager.share(sequence.table.pages(first, first + self._per_block))
            move = Move(seq_id, sequence, number, tokens, pages, block)
            self._moves.append(move)

        def landed(failure: BaseException | None) -> None:
            move.failure, move.ended = failure, True
            self._wake()

        self._mover.move(pages, block, landed)
        return True

    def movable(self, seq_id: SeqId) -> bool:
        """See `BlocksElsewhere`."""
        return next(self._movable(self._sequences[seq_id]), None) is not None

    def moving(self, seq_id: SeqId) -> int:
        """See `BlocksElsewhere`."""
        sequence = self._sequences.find(seq_id)
        return sum(move.sequence is sequence for move in self._moves)

    def away(self, seq_id: SeqId) -> int:
        """See `BlocksElsewhere`."""
        away = self._sequences[seq_id].away
        return len(away) if away is not None else 0

    def most_rows(self, seq_id: SeqId) -> int | None:
        """See `BlocksElsewhere`."""
        away = self._sequences[seq_id].away
        return self._limits.most_rows(away.items) if away is not None else None

    def local_pages(self, seq_id: SeqId) -> int:
        """See `BlocksElsewhere`."""
        sequence = self._sequences[seq_id]
        return len(sequence.table) - sequence.table.pages().count(HOLE)

    def grow_some(self, seq_id: SeqId, length: int, leaving: int) -> int:
        """See `BlocksElsewhere`."""
        with self._lock:
            sequence = self._sequences[seq_id]
            if sequence.beyond:
                length = min(length, sequence.beyond[0][0])
            most = max(self._manager.available - leaving, 0)
            for pages in dict.fromkeys((most, min(most, self._manager.pool.free))):
                end = min(length, reach(sequence, pages, self._page_size))
                try:
                    self._sequences.grow(seq_id, end)
                except NoCapacity:  # `available` is an upper bound
                    continue
                return max(end - sequence.length, 0)
            return max(min(length, reach(sequence, 0, self._page_size)) - sequence.length, 0)

    # Losing

    def take_losses(self) -> Loss:
        """See `BlocksElsewhere`."""
        lost = Loss(0, 0)
        while self._over:
            creditor, loans = self._over.popleft()
            more = self._lose(creditor, loans)
            lost = Loss(lost.blocks + more.blocks, lost.tokens + more.tokens)
        return lost

    def recover(self, error: Exception, *, refusals: int) -> Loss | None:
        """See `BlocksElsewhere`."""
        if not isinstance(error, CreditorFailed):
            return None
        lost = Loss(0, 0)
        for failure in (error, *error.also):
            self._source.failed(failure.creditor)
            loans: Collection[LeaseId] | None = failure.loans
            if failure.lost or not failure.loans:
                if not failure.lost and refusals < REFUSALS:
                    continue  # it may have been busy
                loans = None
            more = self._lose(failure.creditor, loans)
            lost = Loss(lost.blocks + more.blocks, lost.tokens + more.tokens)
        return lost

    # Show

    def holders(self) -> Iterator[Sequence[PageId]]:
        """Yield the pages that moves hold, to prove ownership."""
        for move in self._moves:
            yield move.pages

    def close(self) -> None:
        """Begin no further moves. Call it without the lock."""
        self._mover.close()

    def _wake(self) -> None:
        self.wake()

    def _end_soon(self, creditor: EngineId, loans: Sequence[LeaseId]) -> None:
        self._over.append((creditor, frozenset(loans)))
        self._wake()

    def _give_back(self, block: AwayBlock) -> None:
        self._source.give_back(cast("BorrowedBlock", block))  # it has come from there

    def _movable(self, sequence: PagedSequence) -> Iterator[int]:
        """Yield the local blocks that are full, computed and not on their way, oldest first.

        Those are left out whose pages would stay in use by others.
        """
        leaving = {move.number for move in self._moves if move.sequence is sequence}
        per_block, away = self._per_block, sequence.away or ()
        for begin, end in sequence.present:
            for number in range(-(-begin // self.block_tokens), end // self.block_tokens):
                if number in away or number in leaving:
                    continue
                pages = sequence.table.pages(number * per_block, (number + 1) * per_block)
                if all(self._manager.pool.last_holder(page) for page in pages):
                    yield number

    def _can_let_go(self, move: Move) -> bool:
        """Whether a block has arrived, and its sequence still has it."""
        if move.failure is not None or move.lost:
            return False
        if self._sequences.find(move.seq_id) is not move.sequence:
            return False
        first, begin = move.number * self._per_block, move.number * self.block_tokens
        if move.sequence.table.pages(first, first + self._per_block) != move.pages:
            return False
        return is_present(move.sequence, begin, begin + self.block_tokens)

    def _let_go(self, move: Move) -> None:
        sequence, first = move.sequence, move.number * self._per_block
        if sequence.away is None:
            sequence.away = AwayBlocks(self._per_block)
        sequence.away.add(move.number, move.block)
        sequence.table.fill(range(first, first + self._per_block), [HOLE] * self._per_block)
        self._manager.drop(move.pages)
        self._manager.drop(move.pages)
        self._manager.uncache(
            move.tokens[: (first + self._per_block) * self._page_size], move.pages
        )

    def _lose(self, creditor: EngineId, loans: Collection[LeaseId] | None) -> Loss:
        """End the blocks of a creditor that are in these loans; None: all."""
        blocks = tokens = 0
        with self._lock:
            for move in self._moves:
                move.lost |= is_within(move.block, creditor, loans)
            for sequence in self._sequences.all():
                for number, block in sequence.away.items if sequence.away is not None else ():
                    if is_within(block, creditor, loans):
                        blocks += 1
                        tokens += self.block_tokens
                        lose_block(sequence, number, self.block_tokens)
                        self._give_back(block)
        return Loss(blocks, tokens)
