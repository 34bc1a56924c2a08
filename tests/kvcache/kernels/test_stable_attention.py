"""The kernel of float32 attention: odd shapes, missing pages, NaN, and its e^x."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from kvcache.attention.block_tree import BLOCK
from kvcache.attention.tiles import ABSENT
from kvcache.kernels.exact_f32 import exp
from kvcache.kernels.jit import exact_jit
from kvcache.kernels.stable_attention import (
    KEYS,
    LOWEST,
    BlockRun,
    StableAttention,
    merge,
)

SHAPES = [(1, 1, 4, 1), (2, 3, 20, 4), (3, 3, 64, 16), (1, 7, 72, 64), (2, 1, 128, KEYS)]


class Context:
    """Keys and values of one sequence on shuffled pages, and queries at every position."""

    def __init__(self, length: int, kv_heads: int, group: int, dim: int, page_size: int) -> None:
        generator = torch.Generator().manual_seed(length)
        self.shape, self.length = (kv_heads, group, page_size), length
        count = -(-length // page_size)
        self.pages = torch.randn(count + 3, 2, page_size, kv_heads, dim, generator=generator)
        self.table = torch.randperm(len(self.pages), generator=generator)[:count].int().numpy()
        self.q = torch.randn(length, kv_heads * group, dim, generator=generator)

    def attend(self, starts: list[int]) -> torch.Tensor:
        """Return the attention of all rows, computed in chunks from `starts` to the next."""
        out = torch.full_like(self.q, torch.nan)
        borders = [*starts, self.length]
        for start, end in itertools.pairwise(borders):
            blocks = -(-end // KEYS)
            run = BlockRun(start, start, start, end - start, self.table, 0, blocks)
            StableAttention([run], *self.shape).attend(self.pages, self.q, out)
        return out

    def parts(self, begin: int, end: int, table: np.ndarray) -> tuple[torch.Tensor, ...]:
        """Return the partial results of the last row over blocks `[begin, end)`."""
        _, heads, dim = self.q.shape
        found = torch.zeros(1, heads, dim), torch.full((1, heads), LOWEST), torch.zeros(1, heads)
        run = BlockRun(self.length - 1, 0, self.length - 1, 1, table, begin, end)
        StableAttention([run], *self.shape).attend_parts(self.pages, self.q, *found)
        return found

    def dense(self) -> torch.Tensor:
        _, group, _ = self.shape
        kv = self.pages[self.table].double()
        keys, values = (
            kv[:, n].flatten(0, 1)[: self.length].repeat_interleave(group, 1) for n in (0, 1)
        )
        scores = torch.einsum("qhd,khd->hqk", self.q.double(), keys) / math.sqrt(self.q.shape[2])
        scores = scores.masked_fill(torch.ones(self.length, self.length).triu(1).bool(), -torch.inf)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).float()


def test_its_blocks_are_those_of_the_tree():
    assert KEYS == BLOCK


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape_agrees_with_the_reference_and_has_the_bits_of_its_decodes(
    shape: tuple[int, int, int, int],
):
    context = Context(2 * KEYS + 45, *shape)
    whole = context.attend([0])
    torch.testing.assert_close(whole, context.dense(), atol=2e-6, rtol=2e-5)
    assert torch.equal(whole, context.attend(list(range(context.length))))
    assert torch.equal(whole, context.attend([0, 1, 100, KEYS, 2 * KEYS - 1]))


def test_missing_pages_are_no_keys():
    context = Context(3 * KEYS, 2, 3, 16, 16)
    some = context.table.copy()
    some[3:20] = ABSENT  # the rest of block 0, all of block 1, four pages of block 2
    others = context.table.copy()
    others[[*range(3), *range(20, 24)]] = ABSENT
    parts = [
        [values, top[..., None], total[..., None]]
        for values, top, total in (context.parts(0, 3, table) for table in (some, others))
    ]
    merge(*parts)
    values, _, total = parts[0]
    torch.testing.assert_close(values / total, context.dense()[-1:], atol=2e-6, rtol=2e-5)


def test_no_pages_at_all_are_the_neutral_result():
    context = Context(2 * KEYS, 1, 2, 8, 16)
    values, top, total = context.parts(0, 2, np.full_like(context.table, ABSENT))
    assert not values.any() and not total.any() and (top == LOWEST).all()


def test_nan_stays_in_its_own_rows():
    context = Context(KEYS + 10, 2, 2, 16, 16)
    before = context.attend([0])
    context.q[50] = torch.nan
    after = context.attend([0])
    assert after[50].isnan().all()
    after[50] = before[50]
    assert torch.equal(before, after)


@exact_jit
def _exps(x: np.ndarray, out: np.ndarray) -> None:
    for i in range(len(x)):
        out[i] = exp(x[i])


def test_the_exponential_is_exact_to_a_few_units_of_precision():
    x = np.concatenate([np.linspace(-87, 0, 200_001), -np.logspace(-10, 1.9, 100_000)])
    x = x.astype(np.float32)
    out = np.empty_like(x)
    _exps(x, out)
    exact = np.exp(x.astype(np.float64))
    assert (np.abs(out - exact) / exact).max() < 3e-7
    ends = np.array([0.0, -0.0, -87.5, -1e4, LOWEST, -np.inf, np.nan], np.float32)
    found = np.empty_like(ends)
    _exps(ends, found)
    np.testing.assert_array_equal(found, np.array([1, 1, 0, 0, 0, 0, np.nan], np.float32))
