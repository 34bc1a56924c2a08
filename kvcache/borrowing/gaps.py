"""Blocks of a sequence that are lost: gaps, behind which the rest stays present."""

from __future__ import annotations

from collections.abc import Collection

from kvcache.sequences import AwayBlock, PagedSequence, missing_pages
from kvcache.types import EngineId, LeaseId

__all__ = ["is_present", "is_within", "lose_block", "reach"]


def is_within(block: AwayBlock, creditor: EngineId, loans: Collection[LeaseId] | None) -> bool:
    """Whether a block is in one of these loans of a creditor; None: in any."""
    return block.creditor == creditor and (loans is None or block.loan in loans)


def is_present(sequence: PagedSequence, begin: int, end: int) -> bool:
    """Whether a sequence has the KV of positions `[begin, end)`, here or elsewhere."""
    return any(first <= begin and end <= last for first, last in sequence.present)


def lose_block(sequence: PagedSequence, number: int, block_tokens: int) -> AwayBlock | None:
    """Make a gap of a block that is away, and return the block."""
    if sequence.away is None:
        return None
    block = sequence.away.remove(number)
    begin, end = number * block_tokens, (number + 1) * block_tokens
    rest = []
    for first, last in sequence.present:
        pieces = (first, min(last, begin)), (max(first, end), last)
        rest += [piece for piece in pieces if piece[0] < piece[1]]
    sequence.length = rest.pop(0)[1] if rest and rest[0][0] == 0 else 0
    sequence.beyond = rest
    return block


def reach(sequence: PagedSequence, pages: int, page_size: int) -> int:
    """Return the position up to which a sequence has room with so many further pages."""
    table = sequence.table
    lost = missing_pages(table, sequence.away, len(table))
    if pages < len(lost):
        return lost[pages] * page_size
    return (len(table) + pages - len(lost)) * page_size
