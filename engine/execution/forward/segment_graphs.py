"""Forward passes of prompts on a GPU: CUDA graphs of what lies between the calls of attention.

Attention depends on the sequences of a step, and sends what it has appended, so it is called as
ever. The rest depends on the number of rows alone: a graph for each stretch between two calls of
attention replaces some fifteen launches of a layer by one.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from engine.execution.forward.capture import alias, uncollected
from engine.execution.forward.step_rows import StepRows
from engine.latency import padded_rows
from engine.models import Transformer
from kvcache.cache import KVCache

__all__ = ["SegmentGraphs"]

log = logging.getLogger(__name__)

MOST_ROWS = 2048  # with more rows, launches take a small part of a step


@dataclass(slots=True)
class _Segment:
    """A graph, and the arguments of the attention that follows it."""

    graph: torch.cuda.CUDAGraph
    layer: int
    q: Tensor
    k: Tensor
    v: Tensor


@dataclass(slots=True)
class _Captured:
    """The forward pass of one number of rows."""

    segments: list[_Segment] = field(default_factory=list)
    last: torch.cuda.CUDAGraph | None = None  # behind the last attention
    hidden: Tensor | None = None  # [rows, hidden], written by `last`


class SegmentGraphs:
    """Runs steps of any sequences, whose padded number of rows has been captured."""

    def __init__(self, model: Transformer, cache: KVCache, rows: int) -> None:
        """Capture graphs for each padded number of rows up to `rows`. Takes seconds."""
        config, device = model.config, cache.store.device
        self._model, self._cache = model, cache
        counts = sorted({padded_rows(n, 1) for n in range(1, min(rows, MOST_ROWS) + 1)})
        most = counts[-1]
        self._host = torch.zeros((2, most), dtype=torch.int64, pin_memory=True)
        self._inputs = self._host.to(device)  # tokens, positions
        shape = (most, config.num_heads, config.head_dim)
        self._attended = torch.zeros(shape, dtype=cache.layout.dtype, device=device)
        self._pool = torch.cuda.graph_pool_handle()
        self._captured: dict[int, _Captured] = {}
        began = time.monotonic()
        with uncollected():
            for count in reversed(counts):  # the largest first: the others then use its memory
                self._captured[count] = self._capture(count)
        log.info(
            "CUDA graphs for prompts of up to %d rows in %.1f s", most, time.monotonic() - began
        )

    def run(self, rows: StepRows) -> Tensor | None:
        """Return the hidden states of a step that has begun, `[rows, hidden]`.

        None if no graphs fit it. They are valid until the next call.
        """
        count = len(rows.tokens)
        captured = self._captured.get(count)
        if captured is None or captured.last is None:
            return None
        self._host[:, :count] = torch.tensor([rows.tokens, rows.positions])
        self._inputs.copy_(self._host, non_blocking=True)
        attended = self._attended[:count]
        for segment in captured.segments:
            segment.graph.replay()
            attended.copy_(self._cache.attention(segment.layer, segment.q, segment.k, segment.v))
        captured.last.replay()
        return captured.hidden

    @torch.inference_mode()
    def _capture(self, count: int) -> _Captured:
        tokens, positions = self._inputs[0, :count], self._inputs[1, :count]
        recorder = _Recorder(self._attended[:count], self._pool)
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            # The first run compiles kernels and allocates what libraries keep.
            self._model(tokens, positions, _Unrecorded(self._attended[:count]))
            torch.cuda.synchronize()
            recorder.begin()
            hidden = self._model(tokens, positions, recorder)
            recorder.end(hidden)
        torch.cuda.current_stream().wait_stream(aside)
        return recorder.captured


class _Unrecorded:
    """Stands in for the cache while the model runs without it."""

    def __init__(self, attended: Tensor) -> None:
        self._attended = attended

    def attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self._attended


class _Recorder:
    """Stands in for the cache while the model is captured: a graph ends at each attention."""

    def __init__(self, attended: Tensor, pool: Any) -> None:
        self.captured = _Captured()
        self._attended, self._pool = attended, pool
        self._graph = torch.cuda.CUDAGraph()

    def begin(self) -> None:
        """Begin a graph."""
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """End a graph before an attention, whose result the next graph finds in `attended`."""
        self._graph.capture_end()
        self.captured.segments.append(_Segment(self._graph, layer, alias(q), alias(k), alias(v)))
        self.begin()
        return self._attended

    def end(self, hidden: Tensor) -> None:
        """End the last graph, which computes `hidden`."""
        self._graph.capture_end()
        self.captured.last, self.captured.hidden = self._graph, alias(hidden)
