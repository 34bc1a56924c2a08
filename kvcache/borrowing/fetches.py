"""Blocks that come home: called back by their creditor, ordered by the router, or cheaper here.

    away ── own pages, a landing, `send_home` ──► landed ── settle ──► local, the block given back
      └───── refusal, death, silence: the landing is abandoned, the block stays away, or is lost

Pages of an abandoned landing go through the quarantine of leases, since the creditor may still be
writing.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple, cast

from kvcache.borrowing.fetch import Fetch, HomeOrder
from kvcache.borrowing.fetch_cost import FetchCost
from kvcache.errors import Internal, KVIncomplete, NoCapacity
from kvcache.lease import Landings
from kvcache.lending import BlockSource, BorrowedBlock
from kvcache.pages import PageManager
from kvcache.sequences import AwayBlock, FetchCause, PagedSequence, SequenceTable
from kvcache.types import EngineId, LeaseId, SeqId

__all__ = ["Fetches", "Resident"]

log = logging.getLogger(__name__)

PER_CREDITOR = 4  # fetches under way
PATIENCE_S = 1.0  # for which a block that is called back waits for room: its creditor waits, too
LONGEST_S = 30.0  # of a fetch, whatever the source says
FAILURES = 3  # of an order, after which it is over
REST_S = 5.0  # after a failure, before blocks come home from the same creditor to save queries


class Resident(NamedTuple):
    """A block that is away, and whose it is."""

    seq_id: SeqId
    sequence: PagedSequence
    number: int
    block: AwayBlock


class Fetches:
    """The fetches of one cache. The cache's lock guards it."""

    def __init__(
        self,
        source: BlockSource,
        sequences: SequenceTable,
        manager: PageManager,
        landings: Landings,
        cost: FetchCost,
        clock: Callable[[], float],
        wake: Callable[[], object],
        *,
        block_tokens: int,
    ) -> None:
        """`wake` is called on any thread when `settle` has something to do."""
        self.home: Counter[str] = Counter()  # blocks come home, by cause
        self.lacking = 0  # pages that blocks called back have lacked in the latest `serve`
        self._source, self._sequences, self._manager = source, sequences, manager
        self._landings, self._cost, self._clock, self._wake = landings, cost, clock, wake
        self._per_block = block_tokens // sequences.page_size
        self._fetches: list[Fetch] = []
        # Loans that are called back, and until when their blocks wait for room.
        self._called_back: dict[tuple[EngineId, LeaseId], float] = {}
        self._refused: list[AwayBlock] = []  # called back, and their fetch has failed
        self._orders: list[HomeOrder] = []
        self._rests: dict[EngineId, float] = {}  # creditors of which a fetch failed, until when

    # What is to be fetched

    def call_back(self, creditor: EngineId, loans: frozenset[LeaseId]) -> None:
        """Note that blocks in these loans have to come home, or be lost."""
        until = self._clock() + PATIENCE_S
        for loan in loans:
            self._called_back.setdefault((creditor, loan), until)

    def is_called_back(self, block: AwayBlock) -> bool:
        """Whether a block has to leave its creditor."""
        return (block.creditor, block.loan) in self._called_back

    def order(self, order: HomeOrder) -> None:
        """Begin an order."""
        self._orders.append(order)

    def cancel(self, order: HomeOrder) -> None:
        """Fetch nothing further for an order."""
        if order in self._orders:
            self._orders.remove(order)

    def serve(self) -> None:
        """Fetch what is called back or ordered, and leave every sequence a page to grow into."""
        self.lacking = 0
        if not (self._called_back or self._orders):
            return
        away = list(self._away())
        due = {(each.block.creditor, each.block.loan) for each in away}
        self._called_back = {loan: at for loan, at in self._called_back.items() if loan in due}
        leaving = len(self._sequences)
        refused = {id(block) for block in self._refused}
        away = [each for each in away if id(each.block) not in refused]
        for each in self._idle(each for each in away if self.is_called_back(each.block)):
            if not self._begin(each, FetchCause.CALLED_BACK, leaving):
                self.lacking += self._per_block
        for order in list(self._orders):
            theirs = [each for each in away if _is_of(each.block, order)]
            if not theirs or order.home >= order.blocks or order.failures >= FAILURES:
                self.cancel(order)
                order.done()
                continue
            theirs.sort(key=lambda each: each.block.loan)  # whole loans end
            for each in self._idle(theirs):
                if order.home + order.under_way >= order.blocks:
                    break
                if not self._begin(each, FetchCause.SWAP, leaving, order):
                    break

    def fetch_cheaper(
        self, seq_id: SeqId, sequence: PagedSequence, rows: int, steps: int, leaving: int
    ) -> int:
        """See `BlocksElsewhere.fetch_cheaper`. All blocks at a creditor come home, or none."""
        by_creditor: dict[EngineId, list[Resident]] = {}
        for number, block in sequence.away.items if sequence.away is not None else ():
            here = Resident(seq_id, sequence, number, block)
            by_creditor.setdefault(block.creditor, []).append(here)
        for creditor, blocks in sorted(by_creditor.items(), key=lambda item: len(item[1])):
            idle = [each for each in blocks if self._fetch_of(each) is None]
            needed = len(idle) * self._per_block
            if self._clock() < self._rests.get(creditor, 0.0):
                continue
            if not idle or self._manager.available < needed + leaving:
                continue
            if self._cost.cheaper(creditor, len(idle), rows, steps):
                for each in self._idle(idle):
                    self._begin(each, FetchCause.CHEAPER, leaving)
        return sum(fetch.sequence is sequence for fetch in self._fetches)

    # What has come of it

    def settle(self) -> int:
        """Take in the blocks that have landed, and end the fetches that failed or are of no use.

        Returns how many blocks have come home. Call it between two steps.
        """
        home, now = 0, self._clock()
        for fetch in list(self._fetches):
            here = Resident(fetch.seq_id, fetch.sequence, fetch.number, fetch.block)
            wanted = self._is_away(here)
            if wanted and fetch.ended_at is None and now < fetch.began + LONGEST_S:
                continue
            self._fetches.remove(fetch)
            if fetch.order is not None:
                fetch.order.under_way -= 1
            if wanted and self._take_in(fetch, now):
                home += 1
                continue
            self._manager.drop(self._landings.abandon(fetch.landing))
            if not wanted:
                continue
            log.info("a block did not come home: %s", fetch.failure or "it took too long")
            self._rests[fetch.block.creditor] = now + REST_S
            if fetch.order is not None:
                fetch.order.failures += 1
            if self.is_called_back(fetch.block):
                self._refused.append(fetch.block)
        return home

    def take_refused(self) -> list[Resident]:
        """Return the blocks that are called back and do not come home. They are still away."""
        refused, self._refused = self._refused, []
        if not self._called_back:
            return []
        now = self._clock()
        late = {loan for loan, until in self._called_back.items() if until <= now}
        return [
            each
            for each in self._away()
            if self._fetch_of(each) is None
            and (
                (each.block.creditor, each.block.loan) in late
                or any(each.block is other for other in refused)
            )
        ]

    def under_way(self) -> int:
        """Return how many blocks are on their way home."""
        return len(self._fetches)

    def check(self) -> None:
        """Check that landings are those of the fetches. Raises `Internal` if they are not."""
        pages = sorted(list(fetch.landing.pages) for fetch in self._fetches)
        if pages != sorted(map(list, self._landings.holders())):
            raise Internal("a landing has no fetch, or a fetch no landing")

    def _begin(
        self, here: Resident, cause: FetchCause, leaving: int, order: HomeOrder | None = None
    ) -> bool:
        """Begin a fetch, if there is room for the block with `leaving` pages still available."""
        try:
            pages = self._manager.take(self._per_block, leaving=leaving)
        except NoCapacity:
            return False
        try:
            landing = self._landings.open(pages)
        except NoCapacity:
            self._manager.drop(pages)
            return False
        fetch = Fetch(*here, cause, landing, self._clock(), order)
        self._fetches.append(fetch)
        if order is not None:
            order.under_way += 1

        def done(failure: BaseException | None) -> None:
            fetch.failure, fetch.ended_at = failure, self._clock()
            self._wake()

        block = cast("BorrowedBlock", here.block)  # it has come from the source
        self._source.send_home(block, self._landings.address(landing), done)
        return True

    def _take_in(self, fetch: Fetch, now: float) -> bool:
        """Put the pages of a landing into the sequence, if all KV has landed."""
        try:
            pages = self._landings.take(fetch.landing)
        except KVIncomplete:
            return False
        sequence, first = fetch.sequence, fetch.number * self._per_block
        if sequence.away is None:
            raise Internal("a sequence without blocks away has one")
        sequence.away.remove(fetch.number)
        sequence.table.fill(range(first, first + self._per_block), pages)
        stays = fetch.cause is not FetchCause.CALLED_BACK
        sequence.away.came_to_stay += stays
        self.home[fetch.cause] += 1
        if fetch.order is not None:
            fetch.order.home += 1
        creditor = fetch.block.creditor
        self._cost.fetched(creditor, (fetch.ended_at or now) - fetch.began)
        for loan in self._called_back:
            if loan[0] == creditor:  # it gets its pages: the others may wait on
                self._called_back[loan] = now + PATIENCE_S
        block = cast("BorrowedBlock", fetch.block)
        self._source.give_back(block, at_once=fetch.cause is not FetchCause.CHEAPER)
        return True

    def _idle(self, blocks: Iterator[Resident] | list[Resident]) -> Iterator[Resident]:
        """Yield the blocks that can be fetched now: so many of each creditor at a time."""
        busy = Counter(fetch.block.creditor for fetch in self._fetches)
        for each in blocks:
            if self._fetch_of(each) is None and busy[each.block.creditor] < PER_CREDITOR:
                yield each
                busy[each.block.creditor] += 1

    def _away(self) -> Iterator[Resident]:
        """Yield all blocks that are away, those of the earliest sequence first."""
        for seq_id, sequence in self._sequences.items():
            for number, block in sequence.away.items if sequence.away is not None else ():
                yield Resident(seq_id, sequence, number, block)

    def _is_away(self, here: Resident) -> bool:
        """Whether a sequence still has a block, and has it there."""
        if self._sequences.find(here.seq_id) is not here.sequence or here.sequence.away is None:
            return False
        return here.sequence.away.get(here.number) is here.block

    def _fetch_of(self, here: Resident) -> Fetch | None:
        for fetch in self._fetches:
            if fetch.sequence is here.sequence and fetch.number == here.number:
                return fetch
        return None


def _is_of(block: AwayBlock, order: HomeOrder) -> bool:
    theirs = cast("BorrowedBlock", block)
    return (theirs.creditor, theirs.epoch) == (order.creditor, order.epoch)
