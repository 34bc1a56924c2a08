"""Sequences, and the step that computes their next tokens: planned once, run layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from kvcache.attention import Span, Tile, attend, plan_tiles
from kvcache.errors import Internal
from kvcache.transport import Put
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
        group: int,
        device: torch.device,
    ) -> None:
        """`group` = query heads per KV head. Raises `Internal` where no room has been made."""
        self._spans: list[tuple[PagedSequence, Span]] = []
        page_of: list[int] = []
        slot_of: list[int] = []
        for sequence, count in zip(sequences, counts, strict=True):
            start = sequence.length
            if count < 1 or start + count > len(sequence.pages) * page_size:
                raise Internal(f"no room for {count} tokens at {start} of a sequence")
            self._spans.append((sequence, Span(len(page_of), start, count, list(sequence.pages))))
            for position in range(start, start + count):
                page_of.append(sequence.pages[position // page_size])
                slot_of.append(position % page_size)
        self._rows = len(page_of)
        self._page_of = page_of
        self._slot_of = slot_of
        self._page_size = page_size
        self._group = group
        self._device = device

    @cached_property
    def _where(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Page and slot of each row, as tensors, once somebody computes."""
        to = self._device
        return torch.tensor(self._page_of, device=to), torch.tensor(self._slot_of, device=to)

    @cached_property
    def _tiles(self) -> list[Tile]:
        spans = [span for _, span in self._spans]
        return plan_tiles(spans, self._page_size, self._group, self._device)

    def append(self, pages: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write the rows' keys and values into one layer's `pages`."""
        page_of, slot_of = self._where
        pages[page_of, 0, slot_of] = k[: self._rows]
        pages[page_of, 1, slot_of] = v[: self._rows]

    def put(self, layer: int) -> None:
        """Send what is marked of the rows just appended."""
        for sequence, span in self._spans:
            mark = sequence.mark
            if mark is not None:
                begin, end = max(span.start, mark.begin), min(span.start + span.count, mark.end)
                if begin < end:
                    mark.put.write(range(layer, layer + 1), span.pages, begin, end)

    def attend(self, pages: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        """Attention of the rows over one layer's `pages`; rows past the declared ones are zero."""
        out = torch.zeros_like(q)
        for tile in self._tiles:
            attend(tile, q, pages, out)
        return out

    def finish(self) -> None:
        """The rows count as present, and are signalled where they were put."""
        for sequence, span in self._spans:
            sequence.length = span.start + span.count
            mark = sequence.mark
            if mark is not None and mark.begin < sequence.length:
                mark.put.signal(min(sequence.length, mark.end))
