"""Sequences, and the step that computes their next tokens: planned once, run layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from kvcache.attention.stable import Plan, Planner, Span
from kvcache.errors import Internal
from kvcache.lease.put import Put
from kvcache.types import PageId

__all__ = ["Mark", "PagedSequence", "Step"]


@dataclass(slots=True)
class Mark:
    """Positions `[begin, end)` of a sequence go to `put` as soon as they are there."""

    put: Put
    begin: int
    end: int


@dataclass(slots=True)
class PagedSequence:
    """Where a sequence's KV is."""

    pages: list[PageId] = field(default_factory=list)  # from position 0; may reach past `length`
    length: int = 0  # tokens whose KV is here
    mark: Mark | None = None


class Step:
    """The rows of one forward pass: `counts[i]` next tokens of `sequences[i]`, in order."""

    def __init__(
        self,
        sequences: Sequence[PagedSequence],
        counts: Sequence[int],
        *,
        page_size: int,
        planner: Planner,
    ) -> None:
        """Raises `Internal` where no room has been made."""
        self._spans: list[tuple[PagedSequence, Span]] = []
        self._planner = planner
        row = 0
        for sequence, count in zip(sequences, counts, strict=True):
            start = sequence.length
            if count < 1 or start + count > len(sequence.pages) * page_size:
                raise Internal(f"no room for {count} tokens at {start} of a sequence")
            self._spans.append((sequence, Span(row, start, count, list(sequence.pages))))
            row += count

    @cached_property
    def plan(self) -> Plan:
        """For all layers, once somebody computes."""
        return self._planner([span for _, span in self._spans])

    def put(self, layer: int) -> None:
        """Send what is marked of the rows just appended."""
        for sequence, span in self._spans:
            mark = sequence.mark
            if mark is not None:
                begin, end = max(span.start, mark.begin), min(span.start + span.count, mark.end)
                if begin < end:
                    mark.put.write(range(layer, layer + 1), span.pages, begin, end)

    def finish(self) -> None:
        """The rows count as present, and are signalled where they were put."""
        for sequence, span in self._spans:
            sequence.length = span.start + span.count
            mark = sequence.mark
            if mark is not None and mark.begin < sequence.length:
                mark.put.signal(min(sequence.length, mark.end))
