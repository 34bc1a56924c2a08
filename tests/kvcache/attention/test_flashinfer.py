"""The arrays that describe a step to FlashInfer.

The tests need no GPU: `fake_flashinfer` reads the arrays with torch as FlashInfer does. The
reference is that of all attention tests.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

import fake_flashinfer
import numpy as np
import pytest
import torch
from attention_world import CPU, World

from kvcache.attention import DecodePlans
from kvcache.attention.gpu import flashinfer as attention_flashinfer
from kvcache.attention.gpu.flashinfer import FlashInfer, RaggedBatch
from kvcache.attention.select import planner_for
from kvcache.attention.stable import StablePlan
from kvcache.memory.layout import KVLayout
from kvcache.pages.page_pool import SCRATCH_PAGE
from kvcache.sequences.step import Span
from kvcache.types import PageId

CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_flashinfer, "WORKSPACE_BYTES", 1)


def layout(dtype: torch.dtype = torch.bfloat16, dim: int = 64) -> KVLayout:
    return KVLayout(1, 1, 16, 2, dim, dtype)


def world(lengths: list[int], dtype: torch.dtype = torch.bfloat16) -> World:
    made = World(lengths, dim=64, dtype=dtype)
    made.planner = FlashInfer(layout(dtype), made.group, CPU, kernels=fake_flashinfer)
    return made


def near(ours: torch.Tensor, reference: torch.Tensor) -> None:
    torch.testing.assert_close(ours.float(), reference, atol=0.01, rtol=0.01)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.slow
def test_a_mixed_step(dtype: torch.dtype):
    lengths = [300, 1, 129, 70, 33, 200, 16]
    mixed = world(lengths, dtype)
    parts = mixed.mixed()
    for (index, start, count), out in zip(parts, mixed.step(parts), strict=True):
        near(out, mixed.dense(index)[start : start + count])


@pytest.mark.parametrize(("share", "levels"), [(1, 4), (300, 2), (10**9, 1)])
@pytest.mark.slow
def test_shared_pages_are_read_by_levels(monkeypatch: pytest.MonkeyPatch, share: int, levels: int):
    """The page tables branch twice, end at a branch, or share nothing.

    Some sequences decode, others compute a chunk.
    """
    monkeypatch.setattr(attention_flashinfer, "MIN_SAVING", share)
    lengths = [420, 417, 200, 290, 300, 177]
    common = [0, 384, 160, 256, 0, 160]
    alike = world(lengths)
    parts = alike.share(common, [1, 33, 1, 7, 1, 17])
    alike.planner = on = FlashInfer(layout(), alike.group, CPU, kernels=fake_flashinfer)
    for (index, start, _), out in zip(parts, alike.step(parts), strict=True):
        near(out, alike.dense(index)[start:])
    assert len(on._wrappers) == levels


@pytest.mark.slow
def test_padding_rows_are_finite():
    one = world([20])
    one.step([(0, 0, 19)])
    pages = np.array(one.sequences[0].pages, np.int32)
    plan = one.planner([Span(0, 19, 1, pages)])
    out = plan.attend(one.pool, torch.full((4, 6, 64), torch.nan, dtype=torch.bfloat16))
    assert out[1:].isfinite().all()


def test_the_arrays_of_a_plan():
    pages = [PageId(page) for page in (7, 3, 9)]
    ragged = RaggedBatch.of([(5, pages, 32), (1, pages[1:], 1), (2, pages, 33)], 16)
    assert [array.tolist() for array in ragged] == [
        [0, 5, 6, 8], [0, 2, 3, 6], [7, 3, 3, 7, 3, 9], [16, 1, 1],
    ]  # fmt: skip


# Plans of decodes for CUDA graphs


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[World, DecodePlans]]:
    """Sequences but for their last tokens, and plans of up to 8 rows of 300 tokens."""
    monkeypatch.setitem(sys.modules, "kvcache.kernels.append_rows", fake_flashinfer)
    several = world([300, 1, 129, 70])
    for index in (0, 2, 3):
        several.step([(index, 0, len(several.sequences[index].q) - 2)])
    yield several, several.planner.decode_plans(8, 300)
    assert not several.pool[SCRATCH_PAGE].count_nonzero()


def span(several: World, row: int, index: int, at: int) -> Span:
    return Span(row, at, 1, np.array(several.sequences[index].pages, np.int32))


@pytest.mark.slow
@pytest.mark.parametrize("rows", [4, 8])
def test_a_decode_plan_is_set_for_other_steps(plans: tuple[World, DecodePlans], rows: int):
    several, plan = plans[0], plans[1].plan(rows)
    for steps in ([(0, 298), (2, 127)], [(3, 68)], [(2, 128), (3, 69), (1, 0), (0, 299)]):
        spans = [span(several, row, index, at) for row, (index, at) in enumerate(steps)]
        assert plans[1].fit(spans)
        plan.set(spans)
        q, k, v = (
            torch.full((rows, heads, 64), torch.nan, dtype=torch.bfloat16) for heads in (6, 2, 2)
        )
        q[len(steps) :] = 0.0
        for row, (index, at) in enumerate(steps):
            sequence = several.sequences[index]
            q[row], k[row], v[row] = sequence.q[at], sequence.k[at], sequence.v[at]
        plan.append(several.pool, k, v)
        out = plan.attend(several.pool, q)
        assert out.isfinite().all()  # padding rows read the scratch page
        for row, (index, at) in enumerate(steps):
            near(out[row], several.dense(index)[at])


@pytest.mark.slow
def test_a_decode_plan_is_made_anew_where_a_page_was_added(plans: tuple[World, DecodePlans]):
    several, made = plans
    plan, other = made.plan(2), made.plan(3)
    sequence = several.sequences[3]
    for at, count in ((62, 1), (63, 1), (64, 2), (65, 2), (66, 3), (67, 4)):
        if at == 66:  # another plan has written the common tables
            other.set([span(several, 0, 0, 250)])
        if at == 67:  # the same page, as part of another sequence
            sequence.pages[0], sequence.pages[1] = sequence.pages[1], sequence.pages[0]
            several.pool[sequence.pages[:2]] = several.pool[sequence.pages[:2][::-1]]
        plan.set([span(several, 0, 3, at)])
        assert plan._wrapper.plans == count
        out = plan.attend(several.pool, torch.stack([sequence.q[at]] * 2))
        near(out[0], several.dense(3)[at])


def test_steps_that_no_decode_plan_fits(
    plans: tuple[World, DecodePlans], monkeypatch: pytest.MonkeyPatch
):
    several, made = plans
    assert made.fit([span(several, 0, 0, 299)])
    prompt = Span(0, 0, 2, np.array(several.sequences[0].pages, np.int32))
    assert not made.fit([prompt])
    assert not several.planner.decode_plans(2, 100).fit([span(several, 0, 0, 299)])
    twice = [span(several, row, 0, 299) for row in range(2)]
    assert made.fit(twice)  # too few keys are shared
    monkeypatch.setattr(attention_flashinfer, "MIN_SAVING", 1)
    assert not made.fit(twice)


# Selection of attention for a pool


def test_a_gpu_gets_flashinfer(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer)
    planner = planner_for(layout(), 3, CUDA)
    assert isinstance(planner, FlashInfer)


def test_without_flashinfer_torch_is_used_and_logged(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    planner = planner_for(layout(), 3, CUDA)
    assert getattr(planner, "func", None) is StablePlan
    assert "pip install -e '.[cuda]'" in caplog.text


@pytest.mark.parametrize(
    ("dtype", "dim", "said"),
    [(torch.float32, 64, ""), (torch.bfloat16, 80, "FlashInfer has no kernels for heads of 80")],
)
def test_unsupported_layouts_use_torch(monkeypatch, caplog, dtype, dim, said):
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer)
    assert getattr(planner_for(layout(dtype, dim), 3, CUDA), "func", None) is StablePlan
    assert said in caplog.text and bool(said) == bool(caplog.text)


# The calls match the real package


@pytest.mark.skipif(
    importlib.util.find_spec("flashinfer") is None, reason="flashinfer-python is not installed"
)
@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("prefill.py", "BatchPrefillWithPagedKVCacheWrapper.plan"),
        ("prefill.py", "BatchPrefillWithPagedKVCacheWrapper.run"),
        ("cascade.py", "merge_state"),
        ("page.py", "append_paged_kv_cache"),
    ],
)
def test_the_fake_has_the_arguments_of_the_real_one(file: str, name: str):
    """Reads the source, because importing the package requires CUDA."""
    spec = importlib.util.find_spec("flashinfer")
    assert spec is not None and spec.origin is not None
    tree = ast.parse((Path(spec.origin).parent / file).read_text())
    owner, _, function = name.rpartition(".")
    scope: ast.AST = tree
    fake: object = fake_flashinfer
    if owner:
        scope = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == owner)
        fake = getattr(fake, owner)
    real = [n for n in scope.body if isinstance(n, ast.FunctionDef) and n.name == function][-1]
    names = [arg.arg for arg in real.args.args + real.args.kwonlyargs]
    ours = inspect.signature(getattr(fake, function)).parameters
    positional = [n for n, p in ours.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert names[: len(positional)] == positional
    assert set(ours) <= set(names)
