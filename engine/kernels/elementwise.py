"""Element-wise operations between a layer's matrix products: bfloat16 on CPU, one pass each.

Torch needs a dozen calls for them, which cost more than the arithmetic if there are few rows.
Arithmetic is in float32 and rounds to bfloat16 wherever torch's own operations would.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvcache.kernels.jit import (
    ParallelKernel,
    bf16_to_f32,
    exp,
    f32_at,
    f32_bits,
    f32_from_bits,
    f32_to_bf16,
    i64_at,
    jit,
    next_item,
    u16_at,
)

__all__ = ["add_norm", "apply_rope", "swiglu"]

ITEM_ROWS = 16  # rows of a work item
PARALLEL_ROWS = 64  # with fewer rows, waking other threads costs more than it saves


def add_norm(hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Add `delta` to `hidden` in place, both `[rows, width]`; return the RMS norm of the sum.

    The norm is `hidden` divided by its root mean square, times `weight`, `[width]`.
    """
    rows, width = hidden.shape
    out = torch.empty_like(hidden)
    _run(
        _add_norm, rows, hidden.data_ptr(), delta.data_ptr() if delta is not None else 0,
        weight.data_ptr(), out.data_ptr(), width, f32_bits(eps),
    )  # fmt: skip
    return out


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE to `x`, `[rows, heads, head_dim]`, in place; its last two dimensions are dense.

    `cos` and `sin` are `[rows, head_dim / 2]` float32.
    """
    rows, heads, dim = x.shape
    _run(_rope, rows, x.data_ptr(), x.stride(0), cos.data_ptr(), sin.data_ptr(), heads, dim)
    return x


def swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(gate) · up, `[rows, width]`; `gate_up` is `[rows, 2 · width]`."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, width), dtype=gate_up.dtype)
    _run(_swiglu, rows, gate_up.data_ptr(), out.data_ptr(), width)
    return out


def _run(kernel: ParallelKernel, rows: int, *arguments: int) -> None:
    run = kernel.run_parallel if rows >= PARALLEL_ROWS else kernel.run_serial
    run(-(-rows // ITEM_ROWS), rows, *arguments)


@jit
def _add_norm_row(
    row: int, hidden: int, delta: int, weight: int, out: int, width: int, eps: Any
) -> None:
    h, w, o = u16_at(hidden), u16_at(weight), u16_at(out)
    at = row * width
    if delta:
        d = u16_at(delta)
        for i in range(width):
            h[at + i] = f32_to_bf16(bf16_to_f32(h[at + i]) + bf16_to_f32(d[at + i]))
    squares = np.float32(0.0)
    for i in range(width):
        squares += bf16_to_f32(h[at + i]) * bf16_to_f32(h[at + i])
    scale = np.float32(1.0) / np.sqrt(squares / np.float32(width) + eps)
    for i in range(width):
        normed = bf16_to_f32(f32_to_bf16(bf16_to_f32(h[at + i]) * scale))
        o[at + i] = f32_to_bf16(bf16_to_f32(w[i]) * normed)


@ParallelKernel
def _add_norm(address: Any) -> None:
    a = i64_at(address)
    item = next_item(address)
    while item >= 0:
        for row in range(item * ITEM_ROWS, min((item + 1) * ITEM_ROWS, a[2])):
            _add_norm_row(row, a[3], a[4], a[5], a[6], a[7], f32_from_bits(a[8]))
        item = next_item(address)


@jit
def _rope_row(row: int, qkv: int, stride: int, cos: int, sin: int, heads: int, dim: int) -> None:
    x, c, s = u16_at(qkv), f32_at(cos), f32_at(sin)
    half = dim // 2
    angle = row * half
    for head in range(heads):
        at = row * stride + head * dim
        for i in range(half):
            a, b = bf16_to_f32(x[at + i]), bf16_to_f32(x[at + half + i])
            x[at + i] = f32_to_bf16(a * c[angle + i] - b * s[angle + i])
            x[at + half + i] = f32_to_bf16(b * c[angle + i] + a * s[angle + i])


@ParallelKernel
def _rope(address: Any) -> None:
    a = i64_at(address)
    item = next_item(address)
    while item >= 0:
        for row in range(item * ITEM_ROWS, min((item + 1) * ITEM_ROWS, a[2])):
            _rope_row(row, a[3], a[4], a[5], a[6], a[7], a[8])
        item = next_item(address)


@jit
def _swiglu_row(row: int, gate_up: int, out: int, width: int) -> None:
    x, o = u16_at(gate_up), u16_at(out)
    gate, up, to = row * 2 * width, row * 2 * width + width, row * width
    for i in range(width):
        g = bf16_to_f32(x[gate + i])
        # silu(g) = g / (1 + e^-g), computed from e^-|g|, which never overflows.
        e = exp(-abs(g))
        s = np.float32(1.0) / (np.float32(1.0) + e)
        s = s if g >= np.float32(0.0) else e * s
        o[to + i] = f32_to_bf16(bf16_to_f32(f32_to_bf16(g * s)) * bf16_to_f32(x[up + i]))


@ParallelKernel
def _swiglu(address: Any) -> None:
    a = i64_at(address)
    item = next_item(address)
    while item >= 0:
        for row in range(item * ITEM_ROWS, min((item + 1) * ITEM_ROWS, a[2])):
            _swiglu_row(row, a[3], a[4], a[5])
        item = next_item(address)
