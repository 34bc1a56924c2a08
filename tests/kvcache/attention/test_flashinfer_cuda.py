"""FlashInfer's kernels on a GPU, against dense attention, in all kinds of steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attention_world import World

from kvcache.attention import DecodePlan, FlashInfer
from kvcache.attention.gpu import flashinfer as attention_flashinfer
from kvcache.pages.page_pool import SCRATCH_PAGE
from kvcache.sequences.step import Span

pytestmark = [pytest.mark.cuda, pytest.mark.slow]
LENGTHS = [300, 1, 129, 70, 33, 200, 16]


@pytest.fixture(autouse=True)
def installed() -> None:
    pytest.importorskip("flashinfer")


def world(lengths: list[int], dim: int, kv_heads: int = 2, group: int = 3) -> World:
    made = World(
        lengths,
        dim=dim,
        kv_heads=kv_heads,
        group=group,
        dtype=torch.bfloat16,
        device=torch.device("cuda", 0),
    )
    assert isinstance(made.planner, FlashInfer)
    return made


def near(ours: torch.Tensor, reference: torch.Tensor) -> None:
    torch.testing.assert_close(ours.float(), reference, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(("kv_heads", "group"), [(2, 3), (8, 4), (3, 1)])
def test_a_mixed_step(dim: int, kv_heads: int, group: int):
    mixed = world(LENGTHS, dim, kv_heads, group)
    parts = mixed.mixed()
    for (index, start, count), out in zip(parts, mixed.step(parts), strict=True):
        near(out, mixed.dense(index)[start : start + count])
    assert mixed.padding.isfinite().all()


@pytest.mark.parametrize("dim", [64, 128])
def test_a_long_prompt(dim: int):
    """In chunks, of which the last two have so much work that FlashInfer chooses its backend."""
    long = world([3500, 800], dim, 8, 4)
    long.step([(0, 0, 1100), (1, 0, 100)])
    long.step([(0, 1100, 1000)])
    near(long.step([(0, 2100, 900), (1, 100, 300)])[1], long.dense(1)[100:400])
    assert {backend for _, backend in long.planner._wrappers} == {"auto", "fa2"}
    near(long.step([(0, 3000, 500)])[0], long.dense(0)[3000:])


def test_shared_pages_are_read_by_levels(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attention_flashinfer, "MIN_SAVING", 1)
    lengths, common = [420, 417, 200, 290, 300, 177], [0, 384, 160, 256, 0, 160]
    alike = world(lengths, 128)
    parts = alike.share(common, [1, 33, 1, 7, 1, 17])
    for (index, start, _), out in zip(parts, alike.step(parts), strict=True):
        near(out, alike.dense(index)[start:])
    assert len(alike.planner._wrappers) > 2


@pytest.mark.parametrize("dim", [64, 128])
def test_a_captured_plan_is_replayed_with_other_tables(dim: int):
    """One graph serves steps with other sequences, other lengths and fewer rows."""
    several = world(LENGTHS, dim)
    for index, length in enumerate(LENGTHS):
        if length > 2:
            several.step([(index, 0, length - 2)])
    plans = several.planner.decode_plans(8, 512)
    plan = plans.plan(8)
    plan.set(())
    heads = several.kv_heads * several.group
    q = torch.zeros((8, heads, dim), dtype=torch.bfloat16, device="cuda")
    k, v = (torch.zeros((8, several.kv_heads, dim), dtype=q.dtype, device="cuda") for _ in "kv")
    out, graph = captured(plan, several.pool, q, k, v)
    for steps in ([(0, 298)], [(5, 198), (2, 127), (0, 299), (3, 68)], [(2, 128), (6, 14)]):
        spans = []
        for row, (index, at) in enumerate(steps):
            sequence = several.sequences[index]
            q[row], k[row], v[row] = sequence.q[at], sequence.k[at], sequence.v[at]
            spans.append(Span(row, at, 1, np.array(sequence.pages, np.int32)))
        assert plans.fit(spans)
        plan.set(spans)
        graph.replay()
        torch.cuda.synchronize()
        assert out.isfinite().all()
        for row, (index, at) in enumerate(steps):
            near(out[row], several.dense(index)[at])
    assert not several.pool[SCRATCH_PAGE].count_nonzero()


def captured(
    plan: DecodePlan, pool: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.cuda.CUDAGraph]:
    plan.append(pool, k, v)  # compiles the kernels
    plan.attend(pool, q)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.append(pool, k, v)
        out = plan.attend(pool, q)
    return out, graph
