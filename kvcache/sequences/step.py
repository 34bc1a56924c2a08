"""Steps as plain data: bookkeeping describes a forward pass, page stores execute it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from kvcache.sequences.block_table import BlockTable, PageIds
from kvcache.types import PageId, SeqId

__all__ = ["PageCopy", "PagedSequence", "SendRange", "Span", "StepDescription", "StepSend"]


class SendRange(NamedTuple):
    """Positions `[begin, end)` of a sequence, to be sent by the put `claim` when computed."""

    claim: int
    begin: int
    end: int


@dataclass(slots=True)
class PagedSequence:
    """One sequence: its block table, how many tokens have KV, and what is sent of it."""

    table: BlockTable = field(default_factory=BlockTable)  # may reach past `length`
    length: int = 0  # tokens whose KV is present
    send: SendRange | None = None

    @property
    def pages(self) -> list[PageId]:
        """The pages, from position 0."""
        return self.table.pages()


@dataclass(frozen=True, slots=True)
class Span:
    """The tokens of one sequence in a step: rows `[row, row + count)`, positions from `start`."""

    row: int
    start: int
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
    """What a step sends of one span: positions `[begin, end)`, through the put `claim`.

    After the step, the watermark rises to `landed`. `begin >= end` sends nothing.
    """

    claim: int
    span: int
    begin: int
    end: int
    landed: int


class StepDescription(NamedTuple):
    """A step: plain ints and int32 arrays, valid until the step is finished or aborted."""

    seq_ids: tuple[SeqId, ...]
    spans: tuple[Span, ...]  # of each sequence; their rows follow each other from 0
    sends: tuple[StepSend, ...] = ()
    copies: tuple[PageCopy, ...] = ()  # done before anything else
