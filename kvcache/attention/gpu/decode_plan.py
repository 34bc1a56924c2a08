"""Attention of decodes with a fixed number of rows, for steps that are captured in a CUDA graph.

A graph holds the addresses that its kernels read. So a `DecodePlan` keeps its tables in the same
device memory for all steps: `set` writes those of the next step there, and the graph is replayed.
Rows that a step does not need are padding: they read one key of the scratch page, which is zero,
and write none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvcache.memory import KVLayout
from kvcache.pages import SCRATCH_PAGE
from kvcache.sequences import Span

__all__ = ["DecodePlan", "DecodePlans"]

NO_PLACE = -1  # of a padding row's keys and values


class DecodePlans:
    """`DecodePlan`s for several numbers of rows, which share their tables."""

    def __init__(
        self,
        layout: KVLayout,
        group: int,
        *,
        rows: int,
        tokens: int,
        workspace: torch.Tensor,
        wrapper: Any,
        shares: Callable[[Sequence[Span]], bool],
    ) -> None:
        """Allocate tables for up to `rows` rows, of contexts of up to `tokens` tokens.

        `group` is the number of query heads per KV head. `wrapper` is FlashInfer's class for
        decodes. `shares` tells whether rows of a step had better read common keys together, which
        these plans do not.
        """
        device = workspace.device
        heads = layout.held.heads
        self._layout, self._shares = layout, shares
        self._most = rows * layout.pages_for(tokens)
        self._workspace, self._wrapper = workspace, wrapper
        self.shape = (group * heads, heads, layout.head_dim, layout.page_size)
        pinned = device.type == "cuda"
        self._host_places = torch.empty(rows, dtype=torch.int64, pin_memory=pinned)
        self._host_last = torch.empty(rows, dtype=torch.int32, pin_memory=pinned)
        # What the tables have: their wrapper, where each row's pages begin, and the pages.
        self._latest: tuple[Any, npt.NDArray[np.int32], npt.NDArray[np.int32]] | None = None
        self._places = torch.empty(rows, dtype=torch.int64, device=device)
        self._indptr = torch.zeros(rows + 1, dtype=torch.int32, device=device)
        self._indices = torch.zeros(self._most, dtype=torch.int32, device=device)
        self._last_page_len = torch.zeros(rows, dtype=torch.int32, device=device)

    def fit(self, spans: Sequence[Span]) -> bool:
        """Return whether a step of these spans can use a plan, which has at least as many rows."""
        size = self._layout.page_size
        pages = sum(span.start // size + 1 for span in spans) + len(self._places) - len(spans)
        return (
            pages <= self._most
            and all(span.count == 1 and not span.away for span in spans)
            and not self._shares(spans)
        )

    def plan(self, rows: int) -> DecodePlan:
        """Make the plan for a number of rows. `set` it before its first use."""
        wrapper = self._wrapper(
            self._workspace,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=self._indptr[: rows + 1],
            paged_kv_indices_buffer=self._indices,
            paged_kv_last_page_len_buffer=self._last_page_len[:rows],
            backend="fa2",
        )
        return DecodePlan(self, wrapper, rows)

    def set(self, wrapper: Any, rows: int, spans: Sequence[Span]) -> None:
        """Write the tables of a step, for a plan of `rows` rows."""
        size, padding = self._layout.page_size, rows - len(spans)
        tables = [span.pages[: span.start // size + 1] for span in spans]
        starts = np.array([span.start for span in spans], dtype=np.int64)
        places = self._host_places.numpy()
        places[: len(spans)] = [table[-1] for table in tables]
        places[: len(spans)] = places[: len(spans)] * size + starts % size
        places[len(spans) : rows] = NO_PLACE
        self._places[:rows].copy_(self._host_places[:rows], non_blocking=True)
        counts = np.ones(rows + 1, dtype=np.int32)
        counts[0] = 0
        counts[1 : len(spans) + 1] = [len(table) for table in tables]
        begins = np.cumsum(counts, dtype=np.int32)
        indices = np.concatenate([*tables, np.full(padding, SCRATCH_PAGE, np.int32)])
        last = self._host_last.numpy()[:rows]
        last[:] = 1
        last[: len(spans)] += (starts % size).astype(np.int32)
        if self._has(wrapper, begins, indices):
            self._last_page_len[:rows].copy_(self._host_last[:rows], non_blocking=True)
            return
        self._latest = None  # in case that planning fails half-way
        wrapper.plan(
            torch.from_numpy(begins),
            torch.from_numpy(indices),
            self._host_last[:rows],
            *self.shape,
            q_data_type=self._layout.dtype,
            kv_data_type=self._layout.dtype,
        )
        self._latest = wrapper, begins, indices

    def _has(
        self, wrapper: Any, begins: npt.NDArray[np.int32], indices: npt.NDArray[np.int32]
    ) -> bool:
        """Return whether a wrapper's plan is of these pages: it depends on nothing else."""
        return (
            self._latest is not None
            and self._latest[0] is wrapper
            and np.array_equal(self._latest[1], begins)
            and np.array_equal(self._latest[2], indices)
        )

    def append(self, rows: int, pages: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """See `Plan.append`."""
        from kvcache.kernels.append_rows import append_rows

        append_rows(pages, k, v, self._places[:rows])


class DecodePlan:
    """A `Plan` of a fixed number of rows, whose kernels a CUDA graph can hold."""

    def __init__(self, plans: DecodePlans, wrapper: Any, rows: int) -> None:
        self.rows = rows
        self._plans, self._wrapper = plans, wrapper

    def set(self, spans: Sequence[Span]) -> None:
        """Prepare a step of at most `rows` spans of one token each, which `DecodePlans.fit`."""
        self._plans.set(self._wrapper, self.rows, spans)

    def append(self, pages: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """See `Plan.append`."""
        self._plans.append(self.rows, pages, k, v)

    def attend(self, pages: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        """See `Plan.attend`; the padding rows of the result are finite, not zero."""
        out: torch.Tensor = self._wrapper.run(q, pages)
        return out
