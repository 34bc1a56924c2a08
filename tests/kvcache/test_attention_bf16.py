"""Attention in bfloat16: pages read in place, chunks by torch's kernel, against the reference."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from attention_world import World

from kvcache import attention_bf16
from kvcache.attention_bf16 import Bf16Plan


@pytest.fixture(params=[0, 10**9], ids=["parallel", "serial"], autouse=True)
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_bf16, "TOGETHER", request.param)


def world(lengths: list[int], **shape: Any) -> World:
    made = World(lengths, dtype=torch.bfloat16, **shape)
    assert isinstance(made.planner([]), Bf16Plan)
    return made


def near(ours: torch.Tensor, reference: torch.Tensor) -> None:
    """Within two steps of bfloat16, of which there are 2^-8 to a doubling."""
    assert ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours.float(), reference, atol=0.01, rtol=0.01)


# Few, for each is compiled.
@pytest.mark.parametrize(("page_size", "kv_heads", "group"), [(16, 2, 3), (1, 1, 1), (32, 3, 8)])
def test_decodes_of_many_lengths(page_size: int, kv_heads: int, group: int):
    lengths = [1, 2, 15, 16, 17, 130, 257, 31]
    many = world(lengths, page_size=page_size, kv_heads=kv_heads, group=group)
    for index, length in enumerate(lengths):
        if length > 1:
            many.step([(index, 0, length - 1)])
    parts = [(index, length - 1, 1) for index, length in enumerate(lengths)]
    for index, out in enumerate(many.step(parts)):
        near(out, many.dense(index)[-1:])


def test_a_decode_at_every_position():
    one = world([70])
    near(torch.cat([one.step([(0, at, 1)])[0] for at in range(70)]), one.dense(0))


@pytest.mark.parametrize("cuts", [[], [1], [16], [100, 131], [7, 8, 9, 140]])
def test_a_prefill_in_chunks(cuts: list[int]):
    one = world([150])
    borders = [0, *cuts, 150]
    steps = pairwise(borders)
    near(torch.cat([one.step([(0, a, b - a)])[0] for a, b in steps]), one.dense(0))


def test_a_mixed_step():
    lengths = [300, 1, 129, 70, 33, 200]
    mixed = world(lengths)
    for index, length in enumerate(lengths[:4]):
        if length > 1:
            mixed.step([(index, 0, length - 1)])
    mixed.step([(5, 0, 150)])
    parts = [(4, 0, 33), *((index, lengths[index] - 1, 1) for index in range(4)), (5, 150, 50)]
    for (index, start, count), out in zip(parts, mixed.step(parts), strict=True):
        near(out, mixed.dense(index)[start : start + count])


def test_scores_that_differ_by_much():
    """The running maximum rises late, and weights vanish."""
    one = world([80])
    sequence = one.sequences[0]
    sequence.k[77] *= 100
    sequence.k[3] *= -100
    sequence.q *= 10
    near(torch.cat([one.step([(0, at, 1)])[0] for at in range(80)]), one.dense(0))


def test_what_a_reused_page_held_never_shows():
    for garbage in (torch.inf, torch.nan, 3e38):
        clean, other = world([100]), world([100])
        other.pool[1:] = garbage
        for parts in ([(0, 0, 90)], [(0, 90, 1)], [(0, 91, 5)]):
            assert torch.equal(other.step(parts)[0], clean.step(parts)[0])
