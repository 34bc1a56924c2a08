"""Steps as plain data: bookkeeping describes a forward pass, page stores execute it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

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
    length: int = 0  # tokens whose KV is present
    coming: int = 0  # tokens of steps that are described and have not ended
    send: SendRange | None = None

    @property
    def pages(self) -> list[PageId]:
        """The pages, from position 0."""
        return self.table.pages()


@dataclass(slots=True)
class Span:
    """The tokens of one sequence in a step: rows `[row, row + count)`, positions from `start`."""

    row: int
    start: TokenPos
    count: int
    pages: PageIds  # the sequence's block table, from position 0


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
