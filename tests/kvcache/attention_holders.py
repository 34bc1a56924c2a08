"""A sequence whose pages lie in the pools of several holders, and what they make of its queries."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from attention_world import CPU, World

from kvcache.attention import HeldPlan, HeldSpan, Part, held_planner_for
from kvcache.memory.layout import KVLayout
from kvcache.types import TokenPos

__all__ = ["Shape", "Split", "bits"]


class Shape(NamedTuple):
    """The heads of a model."""

    kv_heads: int
    group: int
    dim: int


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits: they tell -0 from +0, and equal NaNs are equal."""
    return tensor.contiguous().view(torch.int32)


class Split:
    """Rows at positions `[start, length)`; page `i` of the sequence lies with `owners[i]`.

    Each holder has a pool of its own, with the pages in another order; all other slots are NaN.
    """

    def __init__(
        self,
        length: int,
        start: int,
        owners: Sequence[int],
        shape: Shape,
        *,
        page_size: int = 16,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.start, self.count = TokenPos(start), length - start
        self.world = World([length], page_size=page_size, dtype=dtype, **shape._asdict())
        self.q = self.world.sequences[0].q[start:]
        if start:
            self.world.step([(0, 0, start)])
        (self.local,) = self.world.step([(0, start, self.count)])
        layout = KVLayout(1, 1, page_size, shape.kv_heads, shape.dim, dtype)
        self.planner = held_planner_for(layout, shape.group, CPU)
        self._owners = np.array(owners[: len(self.world.sequences[0].pages)])

    def plan(self, holder: int) -> tuple[HeldPlan, torch.Tensor]:
        """Return a holder's plan, and its pool with the pages that it holds."""
        numbers = np.flatnonzero(self._owners == holder).astype(np.int32)
        random.Random(holder).shuffle(numbers)
        pool = torch.full_like(self.world.pool, torch.nan)
        ids = random.Random(holder + 100).sample(range(1, len(pool)), len(numbers))
        for number, page in zip(numbers, ids, strict=True):
            pool[page] = self.world.pool[self.world.sequences[0].pages[number]]
        span = HeldSpan(0, self.start, self.count, np.array(ids, np.int32), numbers)
        return self.planner([span]), pool

    def parts(self, holder: int) -> list[Part]:
        """Return the parts that a holder answers with."""
        plan, pool = self.plan(holder)
        (parts,) = plan.attend(pool, self.q)
        return parts

    def all_parts(self) -> list[Part]:
        """Return the parts of all holders."""
        return [part for holder in sorted(set(self._owners)) for part in self.parts(int(holder))]
