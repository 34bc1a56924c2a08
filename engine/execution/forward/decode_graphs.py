"""The forward passes of decodes as CUDA graphs, one for each number of rows.

A decode of few rows launches hundreds of short kernels. Launching them one by one takes the host
longer than the GPU needs to run them; a graph is one launch. It is captured once, over inputs,
tables and outputs that stay where they are, and replayed for each step.
"""

from __future__ import annotations

import logging
import time
from typing import Any, NamedTuple

import torch

from engine.execution.forward.capture import alias, uncollected
from engine.execution.forward.step_rows import StepRows
from engine.latency import padded_rows
from engine.models import Transformer
from kvcache.attention import DecodePlan, DecodePlans
from kvcache.cache import KVCache
from kvcache.page_store import TorchPageStore
from kvcache.sequences import StepDescription

__all__ = ["DecodeGraphs"]

log = logging.getLogger(__name__)

MOST_ROWS = 256  # with more rows, launches take a small part of a step


class _Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    plan: DecodePlan
    logits: torch.Tensor  # [rows, vocab] float32, written by each replay


class DecodeGraphs:
    """Runs steps of decodes by replaying graphs of the whole model."""

    def __init__(
        self,
        model: Transformer,
        cache: KVCache,
        store: TorchPageStore,
        plans: DecodePlans,
        rows: int,
    ) -> None:
        """Capture a graph for each padded number of rows, up to `rows`. Takes seconds."""
        self._model, self._cache, self._store, self._plans = model, cache, store, plans
        self._host = torch.zeros((2, rows), dtype=torch.int64, pin_memory=True)
        self._inputs = self._host.to(store.device)  # tokens, positions
        self._captured: dict[int, _Captured] = {}
        pool: Any = None
        began = time.monotonic()
        # The largest first: the others then use its memory.
        with uncollected():
            for count in sorted({padded_rows(n, 1) for n in range(1, rows + 1)}, reverse=True):
                if count <= rows:
                    self._captured[count] = self._capture(count, pool)
                    pool = self._captured[count].graph.pool()
        log.info(
            "%d CUDA graphs for up to %d decodes in %.1f s",
            len(self._captured), rows, time.monotonic() - began,
        )  # fmt: skip

    @classmethod
    def make(
        cls, model: Transformer, cache: KVCache, rows: int, tokens: int
    ) -> DecodeGraphs | None:
        """Return graphs for up to `rows` rows of contexts of up to `tokens` tokens.

        None where the attention of the pool cannot be captured.
        """
        store = cache.store
        if not isinstance(store, TorchPageStore):
            return None
        rows = padded_rows(min(rows, MOST_ROWS), 1)
        plans = store.decode_plans(rows, tokens)
        return None if plans is None else cls(model, cache, store, plans, rows)

    def run(self, rows: StepRows, step: StepDescription) -> torch.Tensor | None:
        """Return the logits of a step that has begun, `[rows.logits, vocab]` float32.

        None if no graph fits it. The logits are valid until the next call.
        """
        captured = self._captured.get(len(rows.tokens))
        if (
            captured is None
            or rows.logits != len(step.spans)
            or step.sends
            or not self._plans.fit(step.spans)
        ):
            return None
        count = len(rows.tokens)
        self._host[:, :count] = torch.tensor([rows.tokens, rows.positions])
        self._inputs.copy_(self._host, non_blocking=True)
        captured.plan.set(step.spans)
        captured.graph.replay()
        return captured.logits[: rows.logits]

    @torch.inference_mode()
    def _capture(self, count: int, pool: Any) -> _Captured:
        plan = self._plans.plan(count)
        plan.set(())
        tokens, positions = self._inputs[0, :count], self._inputs[1, :count]
        graph = torch.cuda.CUDAGraph()
        with self._store.using(plan):
            # The first run compiles kernels and allocates what libraries keep.
            aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):
                self._model.logits(self._model(tokens, positions, self._cache))
            torch.cuda.current_stream().wait_stream(aside)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                logits = self._model.logits(self._model(tokens, positions, self._cache))
        # An alias: the logits of all graphs together would take hundreds of MiB.
        return _Captured(graph, plan, alias(logits))
