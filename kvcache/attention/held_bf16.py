"""Partial results over held pages in bfloat16 on a CPU, by the kernels of `Bf16Plan`.

bfloat16 has no duty of bit-stability, so a holder merges all keys of a run of neighbouring pages
into one part, whatever blocks they are in. What it returns per run, row and layer is
`heads·(4·head_dim + 8)` bytes. The merged attention differs from that of one engine by rounding:
its scores and sums are float32 too, so by one unit of bfloat16's precision (2^-8 of the value) at
the end, and by one in each weight of a chunk's rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from kvcache.attention.cascade import Row, Segment
from kvcache.attention.cpu_bf16 import (
    ITEMS_PER_THREAD,
    MIN_KEYS,
    PARALLEL_KEYS,
    precompile,
    split_segment,
)
from kvcache.attention.held import HeldSpan, Part, check_queries, check_span, runs, table_of
from kvcache.attention.partial import PartialAttention, SoftmaxSums, merge_into
from kvcache.kernels import prefill_attention
from kvcache.kernels.decode_attention import DecodeAttention
from kvcache.kernels.prefill_attention import PrefillAttention
from kvcache.kernels.segments import KVSegment
from kvcache.types import TokenPos

__all__ = ["Bf16HeldPlan"]


class _Run(NamedTuple):
    """Neighbouring held pages of a span, and where the kernels leave the partial results."""

    begin: TokenPos
    end: TokenPos
    results: list[tuple[int, int, int]]  # first row of the span, first partial result, how many


class Bf16HeldPlan:
    """Like `StableHeldPlan`, in bfloat16; see the module's docstring."""

    def __init__(
        self, spans: Sequence[HeldSpan], *, kv_heads: int, group: int, dim: int, page_size: int
    ) -> None:
        """Shapes are those of the pool; `group` is the number of query heads per KV head.

        Raises `BadRequest` as `StableHeldPlan` does. Compiles the kernels of a new shape.
        """
        self._spans, self._group = list(spans), group
        self._runs: list[list[_Run]] = []
        segments: list[tuple[HeldSpan, _Run, Segment]] = []
        tiled = prefill_attention.supports(group, dim)
        for span in spans:
            check_span(span, page_size)
            table = table_of(span, page_size)
            ends = runs(table)
            found = [_Run(TokenPos(a * page_size), TokenPos(b * page_size), []) for a, b in ends]
            self._runs.append(found)
            rows = [Row(span.row + at, table, span.start + at + 1) for at in range(span.count)]
            for run in found:
                seeing = [row for row in rows if row.length > run.begin]
                for some in [seeing] if tiled else [[row] for row in seeing]:
                    end = min(run.end, some[-1].length)
                    segments.append((span, run, Segment(some, run.begin, end)))
        precompile(kv_heads, group, dim, page_size)
        work = sum(len(some.rows) * (some.end - some.begin) for _, _, some in segments)
        self._parallel = work >= PARALLEL_KEYS
        target = max(work // (ITEMS_PER_THREAD * torch.get_num_threads()), MIN_KEYS)
        self._partials = 0
        single_row: list[KVSegment] = []
        multi_row: list[KVSegment] = []
        for span, run, whole in segments:
            shares = split_segment(whole, target, kv_heads, group, page_size)
            for rows, begin, end in shares if self._parallel else [whole]:
                seeing = [row for row in rows if row.length > begin]
                readers = [
                    (row.row, min(row.length, end), self._partials + at)
                    for at, row in enumerate(seeing)
                ]
                run.results.append((seeing[0].row - span.row, self._partials, len(seeing)))
                self._partials += len(seeing)
                pages = seeing[0].pages[begin // page_size : -(-end // page_size)]
                kv_segment = KVSegment(readers, pages, begin, end)
                (multi_row if len(readers) > 1 else single_row).append(kv_segment)
        shape = (kv_heads, group, dim, page_size)
        self._decode = DecodeAttention(single_row, *shape) if single_row else None
        self._prefill = PrefillAttention(multi_row, *shape) if multi_row else None

    @property
    def part_ranges(self) -> list[list[tuple[TokenPos, TokenPos]]]:
        """See `HeldPlan.part_ranges`."""
        return [[(run.begin, run.end) for run in found] for found in self._runs]

    def attend(self, pages: torch.Tensor, q: torch.Tensor) -> list[list[Part]]:
        """See `HeldPlan.attend`; a part is a run of neighbouring pages."""
        check_queries(self._spans, pages, q, self._group)
        heads, dim = q.shape[1:]
        q = q.contiguous()
        partials = torch.empty((self._partials, heads, dim + 2))
        for kernels in (self._decode, self._prefill):
            if kernels is not None:  # every result is partial: nothing is written to `out`
                kernels.attend(pages, q, q, partials, parallel=self._parallel)
        return [
            [Part(run.begin, run.end, _merged(run, span.count, partials)) for run in found]
            for span, found in zip(self._spans, self._runs, strict=True)
        ]


def _merged(run: _Run, count: int, partials: torch.Tensor) -> PartialAttention:
    _, heads, width = partials.shape
    dim = width - 2
    merged = PartialAttention.neutral(count, heads, dim)
    for row, first, rows in run.results:
        own, some = slice(row, row + rows), partials[first : first + rows]
        merge_into(
            SoftmaxSums(
                merged.values[own], merged.top[own].unsqueeze(-1), merged.total[own].unsqueeze(-1)
            ),
            SoftmaxSums(some[..., :dim], some[..., dim + 1 :], some[..., dim : dim + 1]),
        )
    return merged
