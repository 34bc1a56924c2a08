"""The element-wise kernels on GPUs, against torch's operations there."""

from __future__ import annotations

import pytest
import torch

from engine.models.ops import Ops, _add_norm, _apply_rope, _swiglu, ops_for

pytestmark = pytest.mark.cuda
DTYPES = [torch.bfloat16, torch.float16]
ROWS = [1, 3, 8, 200]


def kernels(dtype: torch.dtype) -> Ops:
    ops = ops_for(dtype, torch.device("cuda", 0))
    assert ops.swiglu is not _swiglu  # the fallback was not taken
    return ops


def near(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Differ in two roundings at most: of the sum of squares, and of the result."""
    epsilon = torch.finfo(ours.dtype).eps
    torch.testing.assert_close(ours, theirs, rtol=2 * epsilon, atol=epsilon / 64)


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to("cuda", dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", [64, 576, 4096])
def test_add_norm(dtype: torch.dtype, rows: int, width: int):
    weight = normal(width, dtype=dtype)
    hidden, delta = normal(rows, width, dtype=dtype), normal(1, rows, width, dtype=dtype)[0]
    for added in (None, delta):
        ours, theirs = hidden.clone(), hidden.clone()
        out = kernels(dtype).add_norm(ours, added, weight, 1e-5)
        near(out, _add_norm(theirs, added, weight, 1e-5))
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dim", [32, 64, 128])
def test_rope_touches_only_what_it_rotates(dtype: torch.dtype, rows: int, dim: int):
    qkv = normal(rows, 12, dim, dtype=dtype)
    cos, sin = normal(rows, dim // 2).cos(), normal(rows, dim // 2).sin()
    wanted = _apply_rope(qkv[:, :9], cos, sin)
    after = qkv.clone()
    out = kernels(dtype).rotate(after[:, :9], cos, sin)
    near(out, wanted)
    assert torch.equal(after[:, 9:], qkv[:, 9:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", [96, 1536, 14336])
def test_swiglu(dtype: torch.dtype, rows: int, width: int):
    gate_up = normal(rows, 2 * width, dtype=dtype)
    near(kernels(dtype).swiglu(gate_up), _swiglu(gate_up))
