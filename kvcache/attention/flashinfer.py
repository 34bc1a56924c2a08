"""Paged attention by FlashInfer's kernels, in 16 bits on a GPU: planned on the host once per step.

What several sequences share is read once for all of them, level by level of what is shared, and
merged by the log-sum-exp rule (FlashInfer's cascade).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from kvcache.attention.cascade import Row, Segment, segments_of
from kvcache.memory.layout import KVLayout
from kvcache.sequences.block_table import PageIds
from kvcache.sequences.step import Span

__all__ = ["FlashInfer", "FlashInferPlan", "Ragged", "supports"]

DTYPES: Final = (torch.float16, torch.bfloat16)
HEAD_DIMS: Final = (64, 128, 256)
WORKSPACE_BYTES: Final = (
    256 << 20
)  # for the pieces of split sequences; what vLLM and SGLang give it
SHARE: Final = 8192  # keys saved that are worth the kernels of one more level; not measured


def supports(layout: KVLayout) -> bool:
    """Whether FlashInfer has kernels for such a pool."""
    return layout.dtype in DTYPES and layout.head_dim in HEAD_DIMS


class Ragged(NamedTuple):
    """Sequences as FlashInfer takes them: int32 arrays in the host's memory.

    `qo_indptr` and `kv_indptr` are `[sequences + 1]`: where the rows of each, and its pages, begin;
    `kv_indices` are the pages; `last_page_len`, `[sequences]`, are keys in the last of each.
    """

    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    last_page_len: torch.Tensor

    @classmethod
    def of(cls, sequences: Sequence[tuple[int, PageIds, int]], page_size: int) -> Ragged:
        """Of rows, pages and keys of each, at least one key; pages past the keys are left out."""
        used = [pages[: -(-keys // page_size)] for _, pages, keys in sequences]
        return cls(
            _int32(accumulate((rows for rows, _, _ in sequences), initial=0)),
            _int32(accumulate(map(len, used), initial=0)),
            torch.from_numpy(np.concatenate(used)),
            _int32((keys - 1) % page_size + 1 for _, _, keys in sequences),
        )


class FlashInfer:
    """FlashInfer for one pool. A plan holds until the next one is made."""

    def __init__(
        self, layout: KVLayout, group: int, device: torch.device, kernels: Any = None
    ) -> None:
        """`group` = query heads per KV head; `kernels` has what module `flashinfer` has.

        Raises `ImportError` where that is not installed.
        """
        if kernels is None:
            import flashinfer

            kernels = flashinfer
        self.kernels: Any = kernels
        self.page_size = layout.page_size
        self.device = device
        heads = layout.held.heads
        self._shape = (group * heads, heads, layout.head_dim, layout.page_size)
        self._dtype = layout.dtype
        self._workspace: torch.Tensor | None = None
        self._wrappers: list[Any] = []  # by level

    def plan(self, spans: Sequence[Span]) -> FlashInferPlan:
        """A `Planner`."""
        return FlashInferPlan(spans, self)

    def level(self, number: int, ragged: Ragged, *, causal: bool) -> Any:
        """What reads level `number` of this step; `causal`: rows are the last of their keys."""
        if self._workspace is None:
            self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)
        while len(self._wrappers) <= number:  # one after the other they use the same room
            wrapper = self.kernels.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD")
            self._wrappers.append(wrapper)
        self._wrappers[number].plan(
            *ragged, *self._shape, causal=causal, q_data_type=self._dtype, kv_data_type=self._dtype
        )
        return self._wrappers[number]


class FlashInferPlan:
    """See `kvcache.attention.plan.Plan`. Calls only start work on the device's current stream."""

    def __init__(self, spans: Sequence[Span], on: FlashInfer) -> None:
        size, device = on.page_size, on.device
        whole = Ragged.of([(s.count, s.pages, s.start + s.count) for s in spans], size)
        self._kernels = on.kernels
        self._rows = sum(span.count for span in spans)
        self._owners = _int32(n for n, s in enumerate(spans) for _ in range(s.count)).to(device)
        self._positions = _int32(at for s in spans for at in _positions(s)).to(device)
        self._tables = Ragged(*(array.to(device) for array in whole))
        begins, levels = _shared(spans, size)
        own = whole
        if levels:
            own = Ragged.of(
                [
                    (span.count, span.pages[begin // size :], span.start + span.count - begin)
                    for span, begin in zip(spans, begins, strict=True)
                ],
                size,
            )
        self._own = on.level(0, own, causal=True)
        self._shared: list[tuple[torch.Tensor, Any]] = []
        for number, level in enumerate(levels, start=1):
            rows = [
                [at for row in segment.rows for at in _rows(spans[row.row])] for segment in level
            ]
            ragged = Ragged.of(
                [
                    (
                        len(some),
                        segment.rows[0].pages[segment.begin // size :],
                        segment.end - segment.begin,
                    )
                    for some, segment in zip(rows, level, strict=True)
                ],
                size,
            )
            where = torch.tensor([at for some in rows for at in some], device=device)
            self._shared.append((where, on.level(number, ragged, causal=False)))

    def append(self, pages: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """See `Plan`."""
        tables, rows = self._tables, self._rows
        self._kernels.append_paged_kv_cache(
            k[:rows], v[:rows], self._owners, self._positions, pages,
            tables.kv_indices, tables.kv_indptr, tables.last_page_len, "NHD",
        )  # fmt: skip

    def attend(self, pages: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        """See `Plan`."""
        out = torch.zeros_like(q)
        asked, result = q[: self._rows], out[: self._rows]
        if not self._shared:
            self._own.run(asked, pages, out=result)
            return out
        values, sums = self._own.run(asked, pages, return_lse=True)
        for where, level in self._shared:
            more = level.run(asked[where], pages, return_lse=True)
            merged = self._kernels.merge_state(values[where], sums[where], *more)
            values[where], sums[where] = merged
        result.copy_(values)
        return out


def _shared(spans: Sequence[Span], page_size: int) -> tuple[list[int], list[list[Segment]]]:
    """Where what a span reads alone begins, and what it reads with others before, by levels.

    The `Row`s of a segment number the spans."""
    begins = [0] * len(spans)
    depths = [0] * len(spans)
    levels: list[list[Segment]] = []
    # Of those that share a segment, each has shared all that is before it with the others.
    for segment in segments_of(
        [Row(n, span.pages, span.start) for n, span in enumerate(spans)],
        page_size,
        min_saving=SHARE,
    ):
        if len(segment.rows) == 1:
            continue
        depth = depths[segment.rows[0].row]
        if depth == len(levels):
            levels.append([])
        levels[depth].append(segment)
        for row in segment.rows:
            begins[row.row] = segment.end
            depths[row.row] += 1
    return begins, levels


def _rows(span: Span) -> range:
    return range(span.row, span.row + span.count)


def _positions(span: Span) -> range:
    return range(span.start, span.start + span.count)


def _int32(values: Iterable[int]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int32)
