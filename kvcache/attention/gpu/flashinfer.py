"""16-bit paged attention on GPUs by FlashInfer's kernels, planned on the host once per step.

Keys that several sequences share are read once for all of them, one level of sharing after the
other, and the partial results are merged by their log-sum-exps (FlashInfer's cascade attention).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from kvcache.attention.cascade import Row, Segment, segments_of
from kvcache.attention.gpu.decode_plan import DecodePlans
from kvcache.memory import KVLayout
from kvcache.sequences import PageIds, Span

__all__ = ["FlashInfer", "FlashInferPlan", "RaggedBatch", "supports"]

DTYPES: Final = (torch.float16, torch.bfloat16)
HEAD_DIMS: Final = (64, 128, 256)
WORKSPACE_BYTES: Final = (
    256 << 20
)  # for partial results of split sequences; the size that vLLM and SGLang use
MIN_SAVING: Final = 8192  # keys saved that justify the launches of one more level; not measured
# Query rows times keys, summed over the sequences, from which FlashInfer's "auto" plans a step. On
# Hopper that is fa3: 1.6 times as fast for prompts as fa2 (bench/LOG.md), with a plan that takes
# the host 0.7 ms longer. fa3 reads a long context by one multiprocessor, so decodes are slow in it.
PROMPT_WORK: Final = 2_000_000
PROMPT_ROWS: Final = 64  # of each sequence in such a step, at least


def supports(layout: KVLayout) -> bool:
    """Return whether FlashInfer has kernels for a pool's dtype and head dimension."""
    return layout.dtype in DTYPES and layout.head_dim in HEAD_DIMS


class RaggedBatch(NamedTuple):
    """Sequences in FlashInfer's form: int32 arrays in host memory.

    `qo_indptr` and `kv_indptr`, `[sequences + 1]`, are where the rows and the pages of each
    sequence begin. `kv_indices` are the pages. `last_page_len`, `[sequences]`, is the number of
    keys in the last page of each.
    """

    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    last_page_len: torch.Tensor

    @classmethod
    def of(cls, sequences: Sequence[tuple[int, PageIds, int]], page_size: int) -> RaggedBatch:
        """Build the batch from `(rows, pages, keys)` of each sequence, with at least one key.

        Pages beyond the last key are dropped.
        """
        used = [pages[: -(-keys // page_size)] for _, pages, keys in sequences]
        return cls(
            _int32(accumulate((rows for rows, _, _ in sequences), initial=0)),
            _int32(accumulate(map(len, used), initial=0)),
            torch.from_numpy(np.concatenate(used)),
            _int32((keys - 1) % page_size + 1 for _, _, keys in sequences),
        )


class FlashInfer:
    """FlashInfer for one pool. A plan is valid until the next one is made."""

    def __init__(
        self, layout: KVLayout, group: int, device: torch.device, kernels: Any = None
    ) -> None:
        """`group` = query heads per KV head; `kernels` replaces the module `flashinfer` in tests.

        Raises: `ImportError` if FlashInfer is not installed.
        """
        if kernels is None:
            import flashinfer

            kernels = flashinfer
        self.kernels: Any = kernels
        self.page_size = layout.page_size
        self.device = device
        self._layout, self._group = layout, group
        heads = layout.held.heads
        self._shape = (group * heads, heads, layout.head_dim, layout.page_size)
        self._dtype = layout.dtype
        self._workspace: torch.Tensor | None = None
        self._wrappers: dict[tuple[int, str], Any] = {}  # by level and backend

    def __call__(self, spans: Sequence[Span]) -> FlashInferPlan:
        """Plan a step; a `Planner`."""
        return FlashInferPlan(spans, self)

    def decode_plans(self, rows: int, tokens: int) -> DecodePlans:
        """Return plans of decodes for CUDA graphs, of up to `rows` rows.

        `tokens` is the longest context.
        """
        return DecodePlans(
            self._layout,
            self._group,
            rows=rows,
            tokens=tokens,
            workspace=self._workspace_tensor(),
            wrapper=self.kernels.BatchDecodeWithPagedKVCacheWrapper,
            shares=lambda spans: bool(_shared(spans, self.page_size)[1]),
        )

    def level(self, number: int, batch: RaggedBatch, *, causal: bool, backend: str = "fa2") -> Any:
        """Return FlashInfer's wrapper, planned for level `number` of this step.

        With `causal`, the rows of a sequence are its last tokens. `backend` is one of FlashInfer's.
        """
        wrapper = self._wrappers.get((number, backend))
        if wrapper is None:  # levels run one after another, in one workspace
            wrapper = self._wrappers[number, backend] = (
                self.kernels.BatchPrefillWithPagedKVCacheWrapper(
                    self._workspace_tensor(), "NHD", backend=backend
                )
            )
        wrapper.plan(
            *batch, *self._shape, causal=causal, q_data_type=self._dtype, kv_data_type=self._dtype
        )
        return wrapper

    def _workspace_tensor(self) -> torch.Tensor:
        if self._workspace is None:  # FlashInfer wants zeros for the first use
            self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)
        return self._workspace


class FlashInferPlan:
    """A `Plan` on a GPU. Calls only enqueue work on the device's current stream."""

    def __init__(self, spans: Sequence[Span], on: FlashInfer) -> None:
        size, device = on.page_size, on.device
        whole = RaggedBatch.of([(s.count, s.pages, s.start + s.count) for s in spans], size)
        self._kernels = on.kernels
        self._rows = sum(span.count for span in spans)
        self._owners = _int32(n for n, s in enumerate(spans) for _ in range(s.count)).to(device)
        self._positions = _int32(at for s in spans for at in _positions(s)).to(device)
        self._tables = RaggedBatch(*(array.to(device) for array in whole))
        begins, levels = _shared(spans, size)
        own = whole
        if levels:
            own = RaggedBatch.of(
                [
                    (span.count, span.pages[begin // size :], span.start + span.count - begin)
                    for span, begin in zip(spans, begins, strict=True)
                ],
                size,
            )
        self._own = on.level(0, own, causal=True, backend=_backend(spans))
        self._shared: list[tuple[torch.Tensor, Any]] = []
        for number, level in enumerate(levels, start=1):
            rows = [
                [at for row in segment.rows for at in _rows(spans[row.row])] for segment in level
            ]
            batch = RaggedBatch.of(
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
            indices = torch.tensor([at for some in rows for at in some], device=device)
            self._shared.append((indices, on.level(number, batch, causal=False)))

    def append(self, pages: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """See `Plan.append`."""
        tables, rows = self._tables, self._rows
        self._kernels.append_paged_kv_cache(
            k[:rows], v[:rows], self._owners, self._positions, pages,
            tables.kv_indices, tables.kv_indptr, tables.last_page_len, "NHD",
        )  # fmt: skip

    def attend(self, pages: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        """See `Plan.attend`."""
        out = torch.zeros_like(q)
        queries, result = q[: self._rows], out[: self._rows]
        if not self._shared:
            self._own.run(queries, pages, out=result)
            return out
        values, sums = self._own.run(queries, pages, return_lse=True)
        for rows, level in self._shared:
            partial = level.run(queries[rows], pages, return_lse=True)
            merged = self._kernels.merge_state(values[rows], sums[rows], *partial)
            values[rows], sums[rows] = merged
        result.copy_(values)
        return out


def _backend(spans: Sequence[Span]) -> str:
    """Return FlashInfer's backend for a step's rows over the keys that they do not share."""
    work = sum(span.count * (span.start + span.count) for span in spans)
    prompts = all(span.count >= PROMPT_ROWS for span in spans)
    return "auto" if prompts and work >= PROMPT_WORK else "fa2"


def _shared(spans: Sequence[Span], page_size: int) -> tuple[list[int], list[list[Segment]]]:
    """Return where each span's unshared keys begin, and the shared segments by level.

    `Row.row` of a segment is the index of a span.
    """
    begins = [0] * len(spans)
    depths = [0] * len(spans)
    levels: list[list[Segment]] = []
    # The readers of a segment have also shared all earlier segments, so their depths are equal.
    for segment in segments_of(
        [Row(n, span.pages, span.start) for n, span in enumerate(spans)],
        page_size,
        min_saving=MIN_SAVING,
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
