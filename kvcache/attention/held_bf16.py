"""Partial results over held pages in bfloat16 on a CPU, by the kernels of `Bf16Plan`.

bfloat16 has no duty of bit-stability, so a holder merges all keys of a run of neighbouring pages
into one part, whatever blocks they are in. What it returns per run, row and layer is
`heads·(4·head_dim + 8)` bytes. The merged attention differs from that of one engine by rounding:
its scores and sums are float32 too, so by one unit of bfloat16's precision (2^-8 of the value) at
the end, and by one in each weight of a chunk's rows.
"""

from __future__ import annotations

from collections import Counter
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
from kvcache.attention.held import (
    HeldSpan,
    Part,
    Ranges,
    check_queries,
    check_span,
    runs,
    split_parts,
    table_of,
)
from kvcache.attention.partial import PartialAttention, SoftmaxSums, merge_into
from kvcache.kernels import prefill_attention
from kvcache.kernels.decode_attention import DecodeAttention
from kvcache.kernels.prefill_attention import PrefillAttention
from kvcache.kernels.segments import KVSegment
from kvcache.types import TokenPos

__all__ = ["Bf16HeldPlan"]


class _Run(NamedTuple):
    """Neighbouring held pages of a span, and its first row in the result."""

    begin: TokenPos
    end: TokenPos
    row: int


class Bf16HeldPlan:
    """Like `StableHeldPlan`, in bfloat16; see the module's docstring."""

    def __init__(
        self, spans: Sequence[HeldSpan], *, kv_heads: int, group: int, dim: int, page_size: int
    ) -> None:
        """Shapes are those of the pool; `group` is the number of query heads per KV head.

        Raises `BadRequest` as `StableHeldPlan` does. Compiles the kernels of a new shape.
        """
        self._spans, self._group = list(spans), group
        self.part_ranges: Ranges = []
        self.rows = 0  # of the result
        segments: list[tuple[HeldSpan, _Run, Segment]] = []
        tiled = prefill_attention.supports(group, dim)
        for span in spans:
            check_span(span, page_size)
            table = table_of(span, page_size)
            found = []
            for first, last in runs(table):
                positions = TokenPos(first * page_size), TokenPos(last * page_size)
                found.append(_Run(*positions, self.rows))
                self.rows += span.count
            self.part_ranges.append([(run.begin, run.end) for run in found])
            rows = [Row(span.row + at, table, span.start + at + 1) for at in range(span.count)]
            for run in found:
                seeing = [row for row in rows if row.length > run.begin]
                for some in [seeing] if tiled else [[row] for row in seeing]:
                    end = min(run.end, some[-1].length)
                    segments.append((span, run, Segment(some, run.begin, end)))
        precompile(kv_heads, group, dim, page_size)
        work = sum(len(some.rows) * (some.end - some.begin) for _, _, some in segments)
        threads = torch.get_num_threads()
        self._parallel = work >= PARALLEL_KEYS and threads > 1
        target = max(work // (ITEMS_PER_THREAD * threads), MIN_KEYS)
        self._partials = 0
        places: list[int] = []  # of the partial results in the result
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
                places += [run.row + row.row - span.row for row in seeing]
                self._partials += len(seeing)
                pages = seeing[0].pages[begin // page_size : -(-end // page_size)]
                kv_segment = KVSegment(readers, pages, begin, end)
                (multi_row if len(readers) > 1 else single_row).append(kv_segment)
        shape = (kv_heads, group, dim, page_size)
        self._decode = DecodeAttention(single_row, *shape) if single_row else None
        self._prefill = PrefillAttention(multi_row, *shape) if multi_row else None

        self._in_place = places == list(range(self.rows))  # nothing is split, no row is blind
        self._turns = _turns(places)

    def attend(self, pages: torch.Tensor, q: torch.Tensor) -> list[list[Part]]:
        """See `HeldPlan.attend`; a part is a run of neighbouring pages."""
        rows = self.attend_rows(pages, q)
        return split_parts(rows, self.part_ranges, [span.count for span in self._spans])

    def attend_rows(
        self, pages: torch.Tensor, q: torch.Tensor, into: PartialAttention | None = None
    ) -> PartialAttention:
        """See `HeldPlan.attend_rows`."""
        check_queries(self._spans, pages, q, self._group)
        heads, dim = q.shape[1:]
        q = q.contiguous()
        partials = torch.empty((self._partials, heads, dim + 2))
        for kernels in (self._decode, self._prefill):
            if kernels is not None:  # every result is partial: nothing is written to `out`
                kernels.attend(pages, q, q, partials, parallel=self._parallel)
        if self._in_place:
            found = PartialAttention(
                partials[..., :dim], partials[..., dim + 1], partials[..., dim]
            )
            if into is None:
                return found
            into.copy_(found)
            return into
        result = into or PartialAttention.empty(self.rows, heads, dim)
        result.fill_neutral()
        for turn, (places, numbers) in enumerate(self._turns):
            some = partials[numbers]
            if turn > 0:
                merge_into(
                    SoftmaxSums(some[..., :dim], some[..., dim + 1 :], some[..., dim : dim + 1]),
                    SoftmaxSums(
                        result.values[places],
                        result.top[places].unsqueeze(-1),
                        result.total[places].unsqueeze(-1),
                    ),
                )
            result.values[places] = some[..., :dim]
            result.total[places] = some[..., dim]
            result.top[places] = some[..., dim + 1]
        return result


def _turns(places: Sequence[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the merges of partial results into their places: a place occurs once in each turn."""
    turns: list[tuple[list[int], list[int]]] = []
    count: Counter[int] = Counter()
    for number, place in enumerate(places):
        if count[place] == len(turns):
            turns.append(([], []))
        turns[count[place]][0].append(place)
        turns[count[place]][1].append(number)
        count[place] += 1
    return [(torch.tensor(where), torch.tensor(which)) for where, which in turns]
