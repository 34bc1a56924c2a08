"""Bit-stable float32 attention on a CPU, by the kernel of `kvcache.kernels.stable_attention`.

It merges blocks along the tree of `kvcache.attention.block_tree`, as `StablePlan` does on other
devices. A row's bits differ from those of `StablePlan`: every float32 pool of a host uses one of
the two.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvcache.attention.block_tree import BLOCK
from kvcache.attention.distributed import pieces_of
from kvcache.attention.held import HeldSpan, Part, Ranges, check_queries, check_span, split_parts
from kvcache.attention.partial import PartialAttention
from kvcache.attention.plan import AppendedRows
from kvcache.kernels.stable_attention import BlockRun, StableAttention
from kvcache.sequences import Span

__all__ = ["CpuStableHeldPlan", "CpuStablePlan"]

CPU = torch.device("cpu")


class CpuStablePlan:
    """The bit-stable `Plan` on a CPU."""

    def __init__(self, spans: Sequence[Span], *, page_size: int, kv_heads: int, group: int) -> None:
        self._rows = AppendedRows(spans, page_size, CPU)
        work = [
            BlockRun(each.row, each.row, each.start, each.count, each.pages, 0, _blocks(each))
            for each in spans
        ]
        self._attention = StableAttention(work, kv_heads, group, page_size)

    def append(self, pages: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """See `Plan.append`."""
        self._rows.append(pages, k, v)

    def attend(self, pages: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        """See `Plan.attend`."""
        out = torch.empty(q.shape)
        out[len(self._rows) :] = 0.0
        self._attention.attend(pages, q, out)
        return out


class CpuStableHeldPlan:
    """Like `StableHeldPlan`, on a CPU; its parts merge to the bits of `CpuStablePlan`."""

    def __init__(
        self, spans: Sequence[HeldSpan], *, page_size: int, kv_heads: int, group: int
    ) -> None:
        """`group` is the number of query heads per KV head.

        Raises `BadRequest` as `StableHeldPlan` does.
        """
        self._spans, self._group = list(spans), group
        self.part_ranges: Ranges = []
        self.rows = 0  # of the result
        self._blind = False  # whether some rows see no key of a part
        work: list[BlockRun] = []
        for span in spans:
            check_span(span, page_size)
            pieces = pieces_of(span, page_size)
            self.part_ranges.append([(piece.begin, piece.end) for piece in pieces])
            for begin, _, node, table in pieces:
                blind = max(begin - span.start, 0)  # rows before the part's first key
                self._blind |= blind > 0
                if blind < span.count:
                    work.append(
                        BlockRun(
                            span.row + blind, self.rows + blind, span.start + blind,
                            span.count - blind, table, node.first, min(node.end, _blocks(span)),
                        )
                    )  # fmt: skip
                self.rows += span.count
        self._attention = StableAttention(work, kv_heads, group, page_size)
        self._checked: object = None  # shapes and dtypes that fit the spans

    def attend(self, pages: torch.Tensor, q: torch.Tensor) -> list[list[Part]]:
        """See `HeldPlan.attend`; a part is a node of the block tree, or lies in one block."""
        rows = self.attend_rows(pages, q)
        return split_parts(rows, self.part_ranges, [span.count for span in self._spans])

    def attend_rows(
        self, pages: torch.Tensor, q: torch.Tensor, into: PartialAttention | None = None
    ) -> PartialAttention:
        """See `HeldPlan.attend_rows`."""
        shapes = pages.shape, q.shape, pages.dtype, q.dtype
        if shapes != self._checked:
            check_queries(self._spans, pages, q, self._group)
            self._checked = shapes
        result = into or PartialAttention.empty(self.rows, *q.shape[1:])
        if self._blind:
            result.fill_neutral()
        self._attention.attend_parts(pages, q, result.values, result.top, result.total)
        return result


def _blocks(span: Span | HeldSpan) -> int:
    """Return how many blocks the span's last row sees."""
    return -(-(span.start + span.count) // BLOCK)
