"""What lies between a layer's matrix products, in bfloat16 on a CPU, one pass over memory each.

Torch takes a dozen calls for them, and its calls cost more than the work where rows are few.
Arithmetic is in float32, and rounded where torch's own would round.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvcache.kernels.jit import (
    Shared,
    bf16,
    exp,
    f32,
    f32_at,
    f32_bits,
    i64_at,
    native,
    next_item,
    to_bf16,
    u16_at,
)

__all__ = ["add_norm", "swiglu", "turn"]

ROWS = 16  # of an item
TOGETHER = 64  # rows from which on it is worth waking other threads


def add_norm(hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """`hidden += delta`, `[rows, width]`, in place; returns it divided by its root mean square,
    times `weight` `[width]`."""
    rows, width = hidden.shape
    out = torch.empty_like(hidden)
    _do(
        _add_norms, rows, hidden.data_ptr(), delta.data_ptr() if delta is not None else 0,
        weight.data_ptr(), out.data_ptr(), width, f32_bits(eps),
    )  # fmt: skip
    return out


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE, in place, of `x` `[rows, heads, head_dim]`, the last two dense; cos and sin are
    `[rows, head_dim / 2]` float32."""
    rows, heads, dim = x.shape
    _do(_turns, rows, x.data_ptr(), x.stride(0), cos.data_ptr(), sin.data_ptr(), heads, dim)
    return x


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) · up of `[rows, 2 · width]`: `[rows, width]`."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, width), dtype=gate_up.dtype)
    _do(_swiglus, rows, gate_up.data_ptr(), out.data_ptr(), width)
    return out


def _do(work: Shared, rows: int, *arguments: int) -> None:
    run = work.together if rows >= TOGETHER else work.alone
    run(-(-rows // ROWS), rows, *arguments)


@native
def _add_norm(
    row: int, hidden: int, delta: int, weight: int, out: int, width: int, eps: Any
) -> None:
    h, w, o = u16_at(hidden), u16_at(weight), u16_at(out)
    at = row * width
    if delta:
        d = u16_at(delta)
        for i in range(width):
            h[at + i] = to_bf16(bf16(h[at + i]) + bf16(d[at + i]))
    squares = np.float32(0.0)
    for i in range(width):
        squares += bf16(h[at + i]) * bf16(h[at + i])
    scale = np.float32(1.0) / np.sqrt(squares / np.float32(width) + eps)
    for i in range(width):
        o[at + i] = to_bf16(bf16(w[i]) * bf16(to_bf16(bf16(h[at + i]) * scale)))


@Shared
def _add_norms(address: Any) -> None:
    a = i64_at(address)
    item = next_item(address)
    while item >= 0:
        for row in range(item * ROWS, min((item + 1) * ROWS, a[2])):
            _add_norm(row, a[3], a[4], a[5], a[6], a[7], f32(a[8]))
        item = next_item(address)


@native
def _turn(row: int, qkv: int, stride: int, cos: int, sin: int, heads: int, dim: int) -> None:
    x, c, s = u16_at(qkv), f32_at(cos), f32_at(sin)
    half = dim // 2
    angle = row * half
    for head in range(heads):
        at = row * stride + head * dim
        for i in range(half):
            a, b = bf16(x[at + i]), bf16(x[at + half + i])
            x[at + i] = to_bf16(a * c[angle + i] - b * s[angle + i])
            x[at + half + i] = to_bf16(b * c[angle + i] + a * s[angle + i])


@Shared
def _turns(address: Any) -> None:
    a = i64_at(address)
    item = next_item(address)
    while item >= 0:
        for row in range(item * ROWS, min((item + 1) * ROWS, a[2])):
            _turn(row, a[3], a[4], a[5], a[6], a[7], a[8])
        item = next_item(address)


@native
def _swiglu(row: int, gate_up: int, out: int, width: int) -> None:
    x, o = u16_at(gate_up), u16_at(out)
    gate, up, to = row * 2 * width, row * 2 * width + width, row * width
    for i in range(width):
        g = bf16(x[gate + i])
        # silu(g) = g / (1 + e^-g); e^-|g| never overflows
        e = exp(-abs(g))
        s = np.float32(1.0) / (np.float32(1.0) + e)
        s = s if g >= np.float32(0.0) else e * s
        o[to + i] = to_bf16(bf16(to_bf16(g * s)) * bf16(x[up + i]))


@Shared
def _swiglus(address: Any) -> None:
    a = i64_at(address)
    item = next_item(address)
    while item >= 0:
        for row in range(item * ROWS, min((item + 1) * ROWS, a[2])):
            _swiglu(row, a[3], a[4], a[5])
        item = next_item(address)
