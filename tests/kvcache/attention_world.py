"""Sequences with queries, keys and values at every position, in a pool, and the dense reference."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from kvcache.attention import merge_plan, partial, select
from kvcache.attention.select import planner_for
from kvcache.memory.layout import KVLayout
from kvcache.pages.page_pool import SCRATCH_PAGE
from kvcache.sequences.step import Span
from kvcache.types import PageId

__all__ = ["BACKENDS", "World", "backend"]

CPU = torch.device("cpu")
BACKENDS = ("kernel", "torch")  # of float32 attention on CPUs
Parts = Sequence[tuple[int, int, int]]  # sequence, start, count


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Compute float32 attention by the kernel, or as where there is none."""
    with pytest.MonkeyPatch.context() as patch:
        if name == "torch":
            patch.setattr(partial, "stable_kernel", lambda: None)
            patch.setattr(select, "stable_kernel", lambda: None)
            patch.setattr(merge_plan, "stable_kernel", lambda: None)
        yield


@dataclass
class Sequence_:
    """One sequence's queries, keys and values at every position, and its pages."""

    q: torch.Tensor  # [length, heads, dim]
    k: torch.Tensor  # [length, kv_heads, dim]
    v: torch.Tensor
    pages: list[PageId]


class World:
    """Sequences with shuffled pages in one pool; slots that were not written are NaN."""

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        page_size: int = 16,
        kv_heads: int = 2,
        group: int = 3,
        dim: int = 16,
        dtype: torch.dtype = torch.float32,
        device: torch.device = CPU,
    ) -> None:
        generator = torch.Generator().manual_seed(1)
        self.page_size, self.group, self.kv_heads, self.dim = page_size, group, kv_heads, dim
        layout = KVLayout(1, 1, page_size, kv_heads, dim, dtype)
        self.planner = planner_for(layout, group, device)
        counts = [-(-length // page_size) for length in lengths]
        order = [PageId(page) for page in range(1, sum(counts) + 1)]
        random.Random(2).shuffle(order)
        shape = (
            sum(counts) + 1,
            3,
            2,
            page_size,
            kv_heads,
            dim,
        )  # 3 layers; the middle one is used
        self.pool = torch.full(shape, torch.nan, dtype=dtype, device=device)[:, 1]
        self.pool[SCRATCH_PAGE] = 0.0
        self.sequences = []
        self.padding = torch.empty(0)  # of the latest step
        for length, count in zip(lengths, counts, strict=True):
            q, k, v = (
                torch.randn(length, heads, dim, generator=generator).to(device, dtype)
                for heads in (kv_heads * group, kv_heads, kv_heads)
            )
            self.sequences.append(Sequence_(q, k, v, order[:count]))
            del order[:count]

    def step(self, parts: Parts) -> list[torch.Tensor]:
        """Append and attend (sequence, start, count) for each part; return its output rows."""
        spans, row = [], 0
        for index, start, count in parts:
            spans.append(Span(row, start, count, np.array(self.sequences[index].pages, np.int32)))
            row += count
        plan = self.planner(spans)
        q, k, v = (self._rows(parts, name) for name in "qkv")
        plan.append(self.pool, k, v)
        out = plan.attend(self.pool, q)
        self.padding = out[row:]
        return [out[span.row : span.row + span.count] for span in spans]

    def _rows(self, parts: Parts, name: str) -> torch.Tensor:
        """Return a step's rows and a padding row, each followed in memory by foreign elements."""
        rows = torch.cat([getattr(self.sequences[i], name)[at : at + n] for i, at, n in parts])
        rows = torch.cat([rows, torch.full_like(rows[:1], torch.nan)])
        return torch.cat([rows, torch.full_like(rows[:, :1], torch.nan)], 1)[:, :-1]

    def mixed(self) -> Parts:
        """Compute what precedes one step of prompts and decodes of seven sequences; return it."""
        lengths = [len(sequence.q) for sequence in self.sequences]
        for index in (0, 2, 3, 6):
            self.step([(index, 0, lengths[index] - 1)])
        self.step([(5, 0, 150)])
        decodes = [(index, lengths[index] - 1, 1) for index in (0, 1, 2, 3, 6)]
        return [(4, 0, 33), *decodes, (5, 150, 50)]

    def share(self, common: Sequence[int], counts: Sequence[int]) -> Parts:
        """Begin each sequence with so many tokens of the first one, in its pages.

        All but the last `counts` tokens of each are computed. Returns the step of these.
        """
        first, parts = self.sequences[0], []
        for sequence, tokens in zip(self.sequences, common, strict=True):
            sequence.pages[: tokens // self.page_size] = first.pages[: tokens // self.page_size]
            sequence.k[:tokens], sequence.v[:tokens] = first.k[:tokens], first.v[:tokens]
        for index, (tokens, count) in enumerate(zip(common, counts, strict=True)):
            start = len(self.sequences[index].q) - count
            if start > tokens:
                self.step([(index, tokens, start - tokens)])
            parts.append((index, start, count))
        return parts

    def dense(self, index: int) -> torch.Tensor:
        """Return the reference: attention at all positions of one sequence, in float64."""
        sequence = self.sequences[index]
        length = len(sequence.q)
        k = sequence.k.double().repeat_interleave(self.group, 1)
        v = sequence.v.double().repeat_interleave(self.group, 1)
        scores = torch.einsum("qhd,khd->hqk", sequence.q.double(), k) * self.dim**-0.5
        mask = torch.ones(length, length, dtype=torch.bool, device=k.device).tril()
        weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v).float()
