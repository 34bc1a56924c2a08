"""The blocks of long sequences that lie with creditors: moved there, given back, and lost.

local ── put ──► landed ── settle ──► away ── lost ──► computed again
                                       └───── `kvcache.borrowing.fetches` ──► local
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, cast

from kvcache.borrowing.answer_limits import AnswerLimits
from kvcache.borrowing.fetch import HomeOrder
from kvcache.borrowing.fetch_cost import FetchCost
from kvcache.borrowing.fetches import Fetches
from kvcache.borrowing.fitting import fitting
from kvcache.borrowing.gaps import is_within, lose_block, reach
from kvcache.borrowing.mover import BlockMover
from kvcache.borrowing.moves import Moves
from kvcache.errors import BadRequest, NoCapacity
from kvcache.lease import Landings
from kvcache.lending import BlockSource, BorrowedBlock, CreditorFailed, Lender
from kvcache.pages import PageManager
from kvcache.sequences import HOLE, AwayBlock, Loss, SequenceTable
from kvcache.types import EngineId, LeaseId, PageId, SeqId

__all__ = ["Borrowing"]

log = logging.getLogger(__name__)

LEAST_BLOCKS = 3  # of a pool: one is on its way, one is computed, and others need room too
REFUSALS = 3  # in a row, after which a creditor counts as lost


class Borrowing:
    """Implements `BlocksElsewhere` for one cache.

    The cache's lock guards the sequences; what the source tells is noted, and takes effect on the
    thread that steps.
    """

    def __init__(
        self,
        source: BlockSource,
        mover: BlockMover,
        sequences: SequenceTable,
        manager: PageManager,
        lender: Lender,
        lock: AbstractContextManager[Any],
        landings: Landings,
        cost: FetchCost,
        clock: Callable[[], float],
        *,
        block_tokens: int,
        limits: AnswerLimits | None = None,
    ) -> None:
        """Listen to the source. `lock` is the cache's, and `block_tokens` the tokens of a block.

        `landings` take the blocks that come home where `cost` says so. `clock` returns monotonic
        seconds.

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
        self._lender = lender
        self._lock = lock
        self._page_size = sequences.page_size
        self._moves = Moves(
            mover, sequences, manager, self._give_back, self._wake, block_tokens=block_tokens
        )
        # As the source tells.
        self._over: deque[tuple[EngineId, frozenset[LeaseId]]] = deque()
        self._called_back: deque[tuple[EngineId, frozenset[LeaseId]]] = deque()
        self._fetches = Fetches(
            source, sequences, manager, landings, cost, clock, self._wake,
            block_tokens=block_tokens,
        )  # fmt: skip
        self._wanted = 0
        self._came_home = 0  # blocks, since the latest `settle`
        sequences.give_back = self._give_back
        source.on_ready = self._wake
        source.on_lost = partial(self._note, self._over)
        source.on_called_back = partial(self._note, self._called_back)

    @property
    def available_pages(self) -> int:
        """See `BlocksElsewhere`."""
        with self._lock:
            return self._manager.available

    @property
    def spare_pages(self) -> int:
        """See `BlocksElsewhere`."""
        with self._lock:
            return self._manager.available - (self._lender.most - self._lender.lent)

    # Moving

    def settle(self) -> int:
        """See `BlocksElsewhere`. Blocks that did not arrive are given back."""
        with self._lock:
            arrived = self._moves.settle()
            home = self._came_home + self._fetches.settle()
            self._came_home = 0
            self._fetches.serve()
        self.moved += arrived
        return arrived + home

    def want(self, blocks: int) -> None:
        """See `BlocksElsewhere`."""
        if blocks != self._wanted:
            self._wanted = blocks
            self._source.want(blocks)

    def move_oldest(self, seq_id: SeqId, tokens: Sequence[int]) -> bool:
        """See `BlocksElsewhere`."""
        with self._lock:
            sequence = self._sequences[seq_id]
            number = next(self._moves.movable(sequence), None)
            if number is None:
                return False
            block = self._source.take()
            if block is None:
                return False
            self._wanted = max(self._wanted - 1, 0)  # as the source counts
            return self._moves.begin(seq_id, number, tokens, block)

    def movable(self, seq_id: SeqId) -> bool:
        """See `BlocksElsewhere`."""
        return next(self._moves.movable(self._sequences[seq_id]), None) is not None

    def moving(self, seq_id: SeqId) -> int:
        """See `BlocksElsewhere`."""
        return self._moves.of(self._sequences.find(seq_id))

    def away(self, seq_id: SeqId) -> int:
        """See `BlocksElsewhere`."""
        away = self._sequences[seq_id].away
        return len(away) if away is not None else 0

    def most_rows(self, seq_id: SeqId) -> int | None:
        """See `BlocksElsewhere`."""
        away = self._sequences[seq_id].away
        if away is None or self._limits is None:
            return None
        held: dict[EngineId, list[int]] = {}
        for number, block in away.items:
            held.setdefault(block.creditor, []).append(number)
        found = [self._limits.most_rows(creditor, blocks) for creditor, blocks in held.items()]
        return min((rows for rows in found if rows is not None), default=None)

    def fitting(self, rows: Sequence[tuple[SeqId, int]]) -> list[bool]:
        """See `BlocksElsewhere`."""
        if self._limits is None:
            return [True] * len(rows)
        away = [(self._sequences[seq_id].away, count) for seq_id, count in rows]
        return fitting(away, self._limits)

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

    # Coming home

    @property
    def home(self) -> Mapping[str, int]:
        """See `BlocksElsewhere`."""
        return self._fetches.home

    @property
    def lacking(self) -> int:
        """See `BlocksElsewhere`."""
        return self._fetches.lacking

    def called_back(self, seq_id: SeqId) -> int:
        """See `BlocksElsewhere`."""
        away = self._sequences[seq_id].away
        items = away.items if away is not None else ()
        return sum(self._fetches.is_called_back(block) for _, block in items)

    def came_to_stay(self, seq_id: SeqId) -> int:
        """See `BlocksElsewhere`."""
        away = self._sequences[seq_id].away
        return away.came_to_stay if away is not None else 0

    def fetch_cheaper(self, seq_id: SeqId, rows: int, steps: int, leaving: int) -> int:
        """See `BlocksElsewhere`."""
        with self._lock:
            sequence = self._sequences[seq_id]
            return self._fetches.fetch_cheaper(seq_id, sequence, rows, steps, leaving)

    def order_home(self, order: HomeOrder) -> None:
        """Bring blocks home as pages come free, until the order is done or cancelled.

        On any thread, as `cancel_order`.
        """
        with self._lock:
            self._fetches.order(order)
        self._wake()

    def cancel_order(self, order: HomeOrder) -> None:
        """Fetch nothing further for an order. What is under way comes home nevertheless."""
        with self._lock:
            self._fetches.cancel(order)

    # Losing

    def take_losses(self) -> Loss:
        """See `BlocksElsewhere`."""
        blocks = 0
        with self._lock:
            self._came_home += self._fetches.settle()  # what has landed is not lost
            while self._called_back:
                creditor, loans = self._called_back.popleft()
                self._fetches.call_back(creditor, loans)
                self._moves.lose(creditor, loans)
            for here in self._fetches.take_refused():
                lose_block(here.sequence, here.number, self.block_tokens)
                self._give_back(here.block, at_once=True)
                blocks += 1
        while self._over:
            blocks += self._lose(*self._over.popleft())
        return Loss(blocks, blocks * self.block_tokens)

    def recover(self, error: Exception, *, refusals: int) -> Loss | None:
        """See `BlocksElsewhere`."""
        if not isinstance(error, CreditorFailed):
            return None
        blocks = 0
        for failure in (error, *error.also):
            self._source.failed(failure.creditor)
            loans: Collection[LeaseId] | None = failure.loans
            if failure.lost or not failure.loans:
                if not failure.lost and refusals < REFUSALS:
                    continue  # it may have been busy
                loans = None
            blocks += self._lose(failure.creditor, loans)
        return Loss(blocks, blocks * self.block_tokens)

    # Show

    def holders(self) -> Iterator[Sequence[PageId]]:
        """Yield the pages that moves hold, to prove ownership."""
        return self._moves.holders()

    def check(self) -> None:
        """Check the blocks on their way home. Raises `Internal` if they are wrong."""
        self._fetches.check()

    def close(self) -> None:
        """Begin no further moves. Call it without the lock."""
        self._mover.close()

    def _wake(self) -> None:
        self.wake()

    def _note(
        self,
        told: deque[tuple[EngineId, frozenset[LeaseId]]],
        creditor: EngineId,
        loans: Sequence[LeaseId],
    ) -> None:
        told.append((creditor, frozenset(loans)))
        self._wake()

    def _give_back(self, block: AwayBlock, *, at_once: bool = False) -> None:
        # It has come from there.
        self._source.give_back(cast("BorrowedBlock", block), at_once=at_once)

    def _lose(self, creditor: EngineId, loans: Collection[LeaseId] | None) -> int:
        """End the blocks of a creditor that are in these loans, None: all; return how many."""
        blocks = 0
        with self._lock:
            self._moves.lose(creditor, loans)
            for sequence in self._sequences.all():
                for number, block in sequence.away.items if sequence.away is not None else ():
                    if is_within(block, creditor, loans):
                        blocks += 1
                        lose_block(sequence, number, self.block_tokens)
                        self._give_back(block)
        return blocks
