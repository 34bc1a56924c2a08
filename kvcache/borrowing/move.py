"""A block on its way to a creditor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvcache.lending import BorrowedBlock
from kvcache.sequences import PagedSequence
from kvcache.types import PageId, SeqId

__all__ = ["Move"]


@dataclass(slots=True, eq=False)
class Move:
    """Block `number` of a sequence. Its pages are held for the move until its put has drained."""

    seq_id: SeqId
    sequence: PagedSequence
    number: int
    tokens: Sequence[int]  # of the sequence
    pages: list[PageId]
    block: BorrowedBlock
    ended: bool = False  # the put has drained
    failure: BaseException | None = None
    lost: bool = False  # the loan has ended meanwhile
