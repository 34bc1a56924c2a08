"""Blocks on their way to creditors, and which of them can go."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence

from kvcache.borrowing.gaps import is_present, is_within
from kvcache.borrowing.move import Move
from kvcache.borrowing.mover import BlockMover
from kvcache.lending import BorrowedBlock
from kvcache.pages import PageManager
from kvcache.sequences import HOLE, AwayBlock, AwayBlocks, PagedSequence, SequenceTable
from kvcache.types import EngineId, LeaseId, PageId, SeqId

__all__ = ["Moves"]

log = logging.getLogger(__name__)


class Moves:
    """The moves of one cache. The cache's lock guards it.

    A block is let go only when its put has drained, and between two steps. Until then its sequence
    is as it was.
    """

    def __init__(
        self,
        mover: BlockMover,
        sequences: SequenceTable,
        manager: PageManager,
        give_back: Callable[[AwayBlock], object],
        wake: Callable[[], object],
        *,
        block_tokens: int,
    ) -> None:
        """`wake` is called on any thread when `settle` has something to do."""
        self._mover, self._sequences, self._manager = mover, sequences, manager
        self._give_back, self._wake = give_back, wake
        self._page_size = sequences.page_size
        self._block_tokens = block_tokens
        self._per_block = block_tokens // self._page_size
        self._moves: list[Move] = []

    def begin(
        self, seq_id: SeqId, number: int, tokens: Sequence[int], block: BorrowedBlock
    ) -> bool:
        """Begin to move a block; return False, giving `block` back, if it is not as large."""
        if len(block.pages) != self._per_block:
            log.error("a block of %s has %d pages", block.creditor, len(block.pages))
            self._give_back(block)
            return False
        sequence, first = self._sequences[seq_id], number * self._per_block
        pages = self._manager.share(sequence.table.pages(first, first + self._per_block))
        move = Move(seq_id, sequence, number, tokens, pages, block)
        self._moves.append(move)

        def landed(failure: BaseException | None) -> None:
            move.failure, move.ended = failure, True
            self._wake()

        self._mover.move(pages, block, landed)
        return True

    def settle(self) -> int:
        """Let go of blocks that have arrived, and give the others back; return how many."""
        arrived = 0
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
        return arrived

    def movable(self, sequence: PagedSequence) -> Iterator[int]:
        """Yield the local blocks that are full, computed and not on their way, oldest first.

        Those are left out whose pages would stay in use by others.
        """
        leaving = {move.number for move in self._moves if move.sequence is sequence}
        per_block, away = self._per_block, sequence.away or ()
        for begin, end in sequence.present:
            for number in range(-(-begin // self._block_tokens), end // self._block_tokens):
                if number in away or number in leaving:
                    continue
                pages = sequence.table.pages(number * per_block, (number + 1) * per_block)
                if all(self._manager.pool.last_holder(page) for page in pages):
                    yield number

    def of(self, sequence: PagedSequence | None) -> int:
        """Return how many blocks of a sequence are on their way."""
        return sum(move.sequence is sequence for move in self._moves)

    def lose(self, creditor: EngineId, loans: Collection[LeaseId] | None) -> None:
        """Let go of nothing that goes into these loans of a creditor; None: into any."""
        for move in self._moves:
            move.lost |= is_within(move.block, creditor, loans)

    def holders(self) -> Iterator[Sequence[PageId]]:
        """Yield the pages that moves hold, to prove ownership."""
        for move in self._moves:
            yield move.pages

    def _can_let_go(self, move: Move) -> bool:
        """Whether a block has arrived, and its sequence still has it."""
        if move.failure is not None or move.lost:
            return False
        if self._sequences.find(move.seq_id) is not move.sequence:
            return False
        first, begin = move.number * self._per_block, move.number * self._block_tokens
        if move.sequence.table.pages(first, first + self._per_block) != move.pages:
            return False
        return is_present(move.sequence, begin, begin + self._block_tokens)

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
