"""The blocks of a step's sequences that are away, as attention over several pools takes them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from kvcache.remote_attention import BorrowedPages
from kvcache.sequences import AwayBlock, Span
from kvcache.types import EngineId, LeaseId

__all__ = ["AwaySpans"]

Items = tuple[tuple[int, AwayBlock], ...]
ByCreditor = Mapping[EngineId, Sequence[BorrowedPages]]


class AwaySpans:
    """Groups blocks by creditor and loan. Keeps what it has made as long as steps need it."""

    def __init__(self) -> None:
        self._latest: dict[int, tuple[Items, ByCreditor]] = {}  # of the latest step, by `id`

    def by_creditor(self, spans: Sequence[Span]) -> dict[int, ByCreditor]:
        """Return the borrowed pages of each span that has any, by the number of the span."""
        found, latest = {}, {}
        for number, span in enumerate(spans):
            if not span.away:
                continue
            known = self._latest.get(id(span.away))
            made = known[1] if known is not None else _group(span.away)
            latest[id(span.away)] = span.away, made  # holding it, so that its `id` stays its own
            found[number] = made
        self._latest = latest
        return found


def _group(away: Items) -> ByCreditor:
    pages: dict[EngineId, dict[LeaseId, list[int]]] = defaultdict(lambda: defaultdict(list))
    numbers: dict[EngineId, dict[LeaseId, list[int]]] = defaultdict(lambda: defaultdict(list))
    for number, block in away:
        size = len(block.pages)
        pages[block.creditor][block.loan] += block.pages
        numbers[block.creditor][block.loan] += range(number * size, (number + 1) * size)
    return {
        creditor: [
            BorrowedPages(
                loan, np.array(own, np.int32), np.array(numbers[creditor][loan], np.int32)
            )
            for loan, own in loans.items()
        ]
        for creditor, loans in pages.items()
    }
