"""Steps as plain data: bookkeeping describes a forward pass, page stores execute it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from kvcache.sequences.away import HOLE, AwayBlock, AwayBlocks, Segments
from kvcache.sequences.block_table import BlockTable, PageIds
from kvcache.types import PageId, SeqId, TokenPos

__all__ = ["PageCopy", "PagedSequence", "SendRange", "Span", "StepDescription", "StepSend"]


class SendRange(NamedTuple):
    """Positions `[begin, end)` of a sequence, which the put `claim` sends once computed."""

    claim: int
    begin: TokenPos
    end: TokenPos


@dataclass(slots=True)
class PagedSequence:
    """One sequence: its block table, its length, and the positions that its put sends."""

    table: BlockTable = field(default_factory=BlockTable)  # may reach past `length`
    length: int = 0  # tokens whose KV is present, without a gap from position 0
    coming: int = 0  # tokens of steps that are described and have not ended
    send: SendRange | None = None
    away: AwayBlocks | None = None  # None: no block of it has ever been moved
    beyond: Segments = field(default_factory=list)  # present behind a gap, which starts at `length`

    @property
    def pages(self) -> list[PageId]:
        """The pages that it holds, from position 0."""
        pages = self.table.pages()
        return pages if self.away is None else [page for page in pages if page != HOLE]

    @property
    def present(self) -> Segments:
        """All positions whose KV is present, here or with creditors."""
        return [(0, self.length), *self.beyond]

    @property
    def elsewhere(self) -> bool:
        """Whether blocks of it are away, or lost."""
        return bool(self.beyond) or (self.away is not None and len(self.away) > 0)

    def advance(self, count: int) -> None:
        """Count the next tokens as present, and with them what lies behind the gap they close."""
        self.length += count
        if self.beyond and self.length >= self.beyond[0][0]:
            self.length = self.beyond.pop(0)[1]


@dataclass(slots=True)
class Span:
    """The tokens of one sequence in a step: rows `[row, row + count)`, positions from `start`."""

    row: int
    start: TokenPos
    count: int
    pages: PageIds  # the sequence's block table, from position 0
    # The blocks before `start` that are away, with their numbers; their entries in `pages` are
    # holes. The same object in each step, until the blocks change.
    away: tuple[tuple[int, AwayBlock], ...] = ()


class PageCopy(NamedTuple):
    """Copy the first `tokens` slots of page `source` to page `target`, in all layers.

    Copies the partial last page of a sequence that another one continues (copy-on-write).
    """

    source: PageId
    target: PageId
    tokens: int


class StepSend(NamedTuple):
    """Positions `[begin, end)` of one span of a step, which the put `claim` sends.

    After the step, the receiver's watermark rises to `landed`. With `begin >= end`, nothing is
    sent.
    """

    claim: int
    span: int
    begin: TokenPos
    end: TokenPos
    landed: TokenPos


class StepDescription(NamedTuple):
    """A step as ints and int32 arrays, which are valid until the step is finished or aborted."""

    seq_ids: tuple[SeqId, ...]
    spans: tuple[Span, ...]  # of each sequence; their rows follow each other from 0
    sends: tuple[StepSend, ...] = ()
    copies: tuple[PageCopy, ...] = ()  # done before anything else
