"""The fused kernels agree with torch's separate operations up to one rounding."""

from __future__ import annotations

import pytest
import torch

from engine.models.ops import Ops, ops_for

CPU = torch.device("cpu")
ROWS = [1, 3, 70]  # serial, and parallel


@pytest.fixture
def fast() -> Ops:
    return ops_for(torch.bfloat16, CPU)


@pytest.fixture
def plain() -> Ops:
    return ops_for(torch.float32, CPU)


def random(*shape: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).bfloat16()


def near(ours: torch.Tensor, reference: torch.Tensor) -> None:
    assert ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours.float(), reference.float(), atol=1e-6, rtol=2**-7)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", [1, 64, 577])
def test_add_norm(fast: Ops, plain: Ops, rows: int, width: int):
    hidden, delta, weight = random(rows, width), random(rows, width, seed=2), random(width, seed=3)
    total = hidden + delta
    expected = plain.add_norm(total.float(), None, weight.float(), 1e-5)
    near(fast.add_norm(hidden, delta, weight, 1e-5), expected)
    assert torch.equal(hidden, total)
    near(fast.add_norm(hidden, None, weight, 1e-5), expected)
    assert torch.equal(hidden, total)


@pytest.mark.parametrize("rows", ROWS)
def test_rotate(fast: Ops, plain: Ops, rows: int):
    x = random(rows, 7, 32)
    angles = torch.rand(rows, 16) * 100
    before = x.clone()
    expected = plain.rotate(x[:, :5].float(), angles.cos(), angles.sin())
    rotated = fast.rotate(x[:, :5], angles.cos(), angles.sin())
    torch.testing.assert_close(rotated.float(), expected, atol=0.01, rtol=2**-7)
    assert torch.equal(x[:, 5:], before[:, 5:])


@pytest.mark.parametrize("rows", ROWS)
def test_swiglu(fast: Ops, plain: Ops, rows: int):
    x = random(rows, 2 * 100) * 20  # includes values whose e^x overflows float32
    x[0, :4] = torch.tensor([0.0, 3e38, -3e38, -1e-30])
    x[0, 100:104] = 1.0
    near(fast.swiglu(x), plain.swiglu(x.float()))
