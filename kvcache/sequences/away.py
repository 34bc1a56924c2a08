"""Sequences that outgrow their engine: blocks that lie with creditors, and blocks that are lost.

    full local block ── moved ──► away ── its loan ends ──► lost ── computed again ──► local
                                   └───── fetched ────────────────────────────────────► local

Positions stay as they are, and so do the entries of the block table. The entries of a block that is
away or lost are holes: they name the scratch page. (Infinite-LLM's rBlocks, section 4.3.)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from kvcache.errors import Internal
from kvcache.sequences.block_table import BlockTable
from kvcache.types import EngineId, LeaseId, PageId

__all__ = ["HOLE", "AwayBlock", "AwayBlocks", "Segments", "check_holes", "missing_pages"]

HOLE = PageId(0)  # the scratch page

Segments = list[tuple[int, int]]  # positions [begin, end), in order


class AwayBlock(Protocol):
    """An aligned block of tokens in pages of a creditor. `kvcache.lending.BorrowedBlock` is one."""

    @property
    def creditor(self) -> EngineId: ...
    @property
    def loan(self) -> LeaseId: ...
    @property
    def pages(self) -> tuple[PageId, ...]:
        """The pages of the block in the creditor's pool, in the order of its positions."""
        ...


class AwayBlocks:
    """The blocks of one sequence that lie with creditors, by number: block `i` is the `i`-th."""

    __slots__ = ("_blocks", "_items", "came_to_stay", "pages_per_block")

    def __init__(self, pages_per_block: int) -> None:
        self.pages_per_block = pages_per_block
        self.came_to_stay = 0  # blocks that were fetched because there is room for them
        self._blocks: dict[int, AwayBlock] = {}
        self._items: tuple[tuple[int, AwayBlock], ...] = ()  # in order

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, number: int) -> bool:
        return number in self._blocks

    def __getitem__(self, number: int) -> AwayBlock:
        return self._blocks[number]

    def get(self, number: int) -> AwayBlock | None:
        """Return a block that is away, or None."""
        return self._blocks.get(number)

    @property
    def items(self) -> tuple[tuple[int, AwayBlock], ...]:
        """The blocks with their numbers, in order. The same object until the blocks change."""
        return self._items

    def add(self, number: int, block: AwayBlock) -> None:
        """Note that a block has been moved. Raises `Internal` if it is away already."""
        if number in self._blocks:
            raise Internal(f"block {number} is away already")
        self._blocks[number] = block
        self._items = tuple(sorted(self._blocks.items()))

    def remove(self, number: int) -> AwayBlock:
        """Forget a block that is lost or has come home, and return it."""
        block = self._blocks.pop(number)
        self._items = tuple(sorted(self._blocks.items()))
        return block


def missing_pages(table: BlockTable, away: AwayBlocks | None, pages: int) -> list[int]:
    """Return the entries among the first `pages` that have neither a page nor a block away.

    Entries past the end of the table are not among them.
    """
    if away is None:
        return []
    per_block, found = away.pages_per_block, []
    for number, page in enumerate(table.ids[:pages].tolist()):
        if page == HOLE and number // per_block not in away:
            found.append(number)
    return found


def check_holes(table: BlockTable, away: AwayBlocks | None, present: Segments, size: int) -> None:
    """Check that holes are the blocks away and what is lost; `size` is that of a page in tokens.

    Raises `Internal` if positions in `present` have neither page nor block, or a block that is away
    has pages or is not present.
    """
    holes = {number for number, page in enumerate(table.ids.tolist()) if page == HOLE}
    elsewhere: set[int] = set()
    if away is not None:
        for number, block in away.items:
            if len(block.pages) != away.pages_per_block:
                raise Internal(f"block {number} is away in {len(block.pages)} pages")
            elsewhere.update(_entries(number, away.pages_per_block))
    if not elsewhere <= holes:
        raise Internal("a block that is away has local pages")
    there = {page for begin, end in present for page in range(begin // size, -(-end // size))}
    if not elsewhere <= there:
        raise Internal("a block is away whose tokens are not present")
    if holes & there != elsewhere:
        raise Internal("tokens are present that have no page")


def _entries(number: int, per_block: int) -> Iterator[int]:
    yield from range(number * per_block, (number + 1) * per_block)
