"""Layers with random weights, whose products kernels are compared with."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.models.linear import Linear

__all__ = ["linear", "random"]


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def linear(outputs: int, inputs: int, dtype: torch.dtype, *, bias: bool = False) -> Linear:
    plain = Linear(inputs, outputs, bias=bias, dtype=dtype)
    weight = random(outputs, inputs, dtype=dtype)
    plain.weight = torch.nn.Parameter(weight, requires_grad=False)
    if bias:
        values = random(outputs, dtype=dtype, seed=1)
        plain.bias = torch.nn.Parameter(values, requires_grad=False)
    return plain
