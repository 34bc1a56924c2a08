"""bfloat16 attention by rows, by register tiles (heads of 64 and 128) and by torch."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from attention_world import World

from kvcache.attention import cpu_bf16 as attention_bf16
from kvcache.attention.cpu_bf16 import Bf16Plan


@pytest.fixture(params=[0, 10**9], ids=["parallel", "serial"], autouse=True)
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_bf16, "PARALLEL_KEYS", request.param)


@pytest.fixture(params=[16, 64])
def dim(request: pytest.FixtureRequest) -> int:
    """Head dimensions without and, if the processor supports them, with register tiles."""
    value: int = request.param
    return value


def world(lengths: list[int], **shape: Any) -> World:
    made = World(lengths, dtype=torch.bfloat16, **shape)
    assert isinstance(made.planner([]), Bf16Plan)
    return made


def near(ours: torch.Tensor, reference: torch.Tensor) -> None:
    """Compare within two units of bfloat16's precision, 2^-8."""
    assert ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours.float(), reference, atol=0.01, rtol=0.01)


# Few shapes, because each is compiled.
SHAPES = [(16, 2, 3, 16), (1, 1, 1, 16), (32, 3, 8, 64), (4, 1, 5, 128)]


@pytest.mark.parametrize(("page_size", "kv_heads", "group", "dim"), SHAPES)
@pytest.mark.slow
def test_decodes_of_many_lengths(page_size: int, kv_heads: int, group: int, dim: int):
    lengths = [1, 2, 15, 16, 17, 130, 257, 31]
    many = world(lengths, page_size=page_size, kv_heads=kv_heads, group=group, dim=dim)
    for index, length in enumerate(lengths):
        if length > 1:
            many.step([(index, 0, length - 1)])
    parts = [(index, length - 1, 1) for index, length in enumerate(lengths)]
    for index, out in enumerate(many.step(parts)):
        near(out, many.dense(index)[-1:])


@pytest.mark.slow
def test_a_decode_at_every_position():
    one = world([70])
    near(torch.cat([one.step([(0, at, 1)])[0] for at in range(70)]), one.dense(0))


@pytest.mark.parametrize("cuts", [[], [1], [16], [100, 131], [7, 8, 9, 140]])
@pytest.mark.slow
def test_a_prefill_in_chunks(cuts: list[int], dim: int):
    one = world([150], dim=dim)
    borders = [0, *cuts, 150]
    steps = pairwise(borders)
    near(torch.cat([one.step([(0, a, b - a)])[0] for a, b in steps]), one.dense(0))


@pytest.mark.slow
def test_a_mixed_step(dim: int):
    lengths = [300, 1, 129, 70, 33, 200]
    mixed = world(lengths, dim=dim)
    for index, length in enumerate(lengths[:4]):
        if length > 1:
            mixed.step([(index, 0, length - 1)])
    mixed.step([(5, 0, 150)])
    parts = [(4, 0, 33), *((index, lengths[index] - 1, 1) for index in range(4)), (5, 150, 50)]
    for (index, start, count), out in zip(parts, mixed.step(parts), strict=True):
        near(out, mixed.dense(index)[start : start + count])


@pytest.mark.parametrize("count", [1, 10])
def test_scores_of_very_different_size(count: int, dim: int):
    """The running maximum rises late, and earlier weights vanish."""
    one = world([80], dim=dim)
    sequence = one.sequences[0]
    sequence.k[77] *= 100
    sequence.k[3] *= -100
    sequence.q *= 10
    steps = range(0, 80, count)
    near(torch.cat([one.step([(0, at, count)])[0] for at in steps]), one.dense(0))


def test_old_contents_of_a_reused_page_never_show(dim: int):
    for garbage in (torch.inf, torch.nan, 3e38):
        clean, other = world([100], dim=dim), world([100], dim=dim)
        other.pool[1:] = garbage
        for parts in ([(0, 0, 90)], [(0, 90, 1)], [(0, 91, 5)]):
            assert torch.equal(other.step(parts)[0], clean.step(parts)[0])


@pytest.mark.parametrize(("page_size", "kv_heads", "group", "dim"), SHAPES)
@pytest.mark.slow
def test_sequences_with_common_prefixes(page_size: int, kv_heads: int, group: int, dim: int):
    """Page tables with prefixes in common at two depths, and an unrelated one."""
    lengths = [420, 417, 200, 290, 300, 161]
    alike = world(lengths, page_size=page_size, kv_heads=kv_heads, group=group, dim=dim)
    first = alike.sequences[0]
    common = [0, 384, 160, 256, 0, 160]
    for sequence, tokens in zip(alike.sequences, common, strict=True):
        sequence.pages[: tokens // page_size] = first.pages[: tokens // page_size]
        sequence.k[:tokens], sequence.v[:tokens] = first.k[:tokens], first.v[:tokens]
    for index, (length, tokens) in enumerate(zip(lengths, common, strict=True)):
        if length - tokens > 1:
            alike.step([(index, tokens, length - 1 - tokens)])
    parts = [(index, length - 1, 1) for index, length in enumerate(lengths)]
    for index, out in enumerate(alike.step(parts)):
        near(out, alike.dense(index)[-1:])


def test_a_long_sequence_among_more_threads(monkeypatch: pytest.MonkeyPatch, dim: int):
    """The sequence is split and the partial results are merged, for a decode and for a chunk."""
    monkeypatch.setattr(attention_bf16, "ITEMS_PER_THREAD", 16)
    one = world([1000], dim=dim)
    one.step([(0, 0, 900)])
    out = torch.cat([one.step([(0, 900, 1)])[0], one.step([(0, 901, 99)])[0]])
    near(out, one.dense(0)[900:])


def test_padding_rows_are_zero(dim: int, monkeypatch: pytest.MonkeyPatch):
    """They go through the rest of the model: memory that was not written would be NaN there."""

    def dirty(*shape: Any, **options: Any) -> torch.Tensor:
        return torch.full(*shape, torch.nan, **options)

    steps = world([40, 30], dim=dim)
    steps.step([(0, 0, 39), (1, 0, 29)])
    monkeypatch.setattr(attention_bf16.torch, "empty", dirty)
    steps.step([(0, 39, 1), (1, 29, 1)])
    assert len(steps.padding) == 1
    assert not steps.padding.any()
