"""`Plan` and `HeldPlan`: attention of a step, planned once and run in every layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvcache.attention.held import HeldSpan, Part, Ranges
from kvcache.attention.partial import PartialAttention
from kvcache.sequences import Span

__all__ = ["AppendedRows", "HeldPlan", "HeldPlanner", "Plan", "Planner", "row_slots"]


class Plan(Protocol):
    """The attention of one step, planned once from the spans and run in every layer."""

    def append(self, pages: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write keys and values of the rows, `[rows, kv_heads, head_dim]`, into one layer's
        `pages`, `[pages, 2, page_size, kv_heads, head_dim]`. Rows beyond the spans are padding and
        are not written."""
        ...

    def attend(self, pages: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        """Return the attention of the rows over one layer's `pages`.

        `q` and the result are `[rows, heads, head_dim]`. The result's padding rows are zero.
        """
        ...


class HeldPlan(Protocol):
    """The partial results of some rows over the pages of their sequences that are held here."""

    @property
    def part_ranges(self) -> Ranges:
        """The keys of the parts of each span, as `attend` returns them."""
        ...

    @property
    def rows(self) -> int:
        """How many rows `attend_rows` returns."""
        ...

    def attend_rows(
        self, pages: torch.Tensor, q: torch.Tensor, into: PartialAttention | None = None
    ) -> PartialAttention:
        """Return the rows of all parts: for each span and each of its parts, the span's rows.

        They are written to `into` if that is given, which is contiguous. Takes what `attend` takes,
        and raises what it raises.
        """
        ...

    def attend(self, pages: torch.Tensor, q: torch.Tensor) -> list[list[Part]]:
        """Return the parts of each span over one layer's pages; none where it has no pages here.

        `pages` is `[pages, 2, page_size, kv_heads, head_dim]`, `q` is `[rows, heads, head_dim]`,
        both of the same dtype. A part's rows are those of its span. Raises `BadRequest` if `q` or
        the pool do not fit the spans.
        """
        ...


Planner = Callable[[Sequence[Span]], Plan]  # rows of the spans are in order and start at 0
HeldPlanner = Callable[[Sequence[HeldSpan]], HeldPlan]


class AppendedRows:
    """Where the rows of a step go, and `Plan.append` by torch's operations."""

    def __init__(self, spans: Sequence[Span], page_size: int, device: torch.device) -> None:
        places = torch.from_numpy(row_slots(spans, page_size)).to(device)
        self._page_of, self._slot_of = places[:, 0].contiguous(), places[:, 1].contiguous()

    def __len__(self) -> int:
        return len(self._page_of)

    def append(self, pages: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """See `Plan.append`."""
        rows = len(self)
        pages[self._page_of, 0, self._slot_of] = k[:rows]
        pages[self._page_of, 1, self._slot_of] = v[:rows]


def row_slots(spans: Sequence[Span], page_size: int) -> npt.NDArray[np.int64]:
    """Return `[rows, 2]`: the page of each row's token, and its slot in that page."""
    if all(span.count == 1 for span in spans):  # for decodes, one list is faster than arrays
        places = [(span.pages[span.start // page_size], span.start % page_size) for span in spans]
        return np.array(places, dtype=np.int64).reshape(-1, 2)
    rows = np.empty((sum(span.count for span in spans), 2), dtype=np.int64)
    for span in spans:
        own = rows[span.row : span.row + span.count]
        index, own[:, 1] = np.divmod(np.arange(span.start, span.start + span.count), page_size)
        own[:, 0] = span.pages[index]
    return rows
