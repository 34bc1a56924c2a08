"""What lies between a layer's matrix products, in bfloat16 on a CPU, one pass over memory each.

Torch takes a dozen calls for them, and its calls cost more than the work where rows are few.
Arithmetic is in float32, and rounded where torch's own would round.
"""

from __future__ import annotations

import numba
import numpy as np
import torch
from torch import Tensor

from kvcache.native import bf16, exp, f32_at, native, parallel, to_bf16, u16_at

__all__ = ["add_norm", "compiled", "swiglu", "turn"]

PARALLEL_ROWS = 64  # below it, waking other threads costs more than it saves


def add_norm(hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """`hidden += delta`, `[rows, width]`, in place; returns it divided by its root mean square,
    times `weight` `[width]`."""
    rows, width = hidden.shape
    out = torch.empty_like(hidden)
    run = _add_norm_parallel if rows >= PARALLEL_ROWS else _add_norm
    run(
        hidden.data_ptr(), delta.data_ptr() if delta is not None else 0, weight.data_ptr(),
        out.data_ptr(), rows, width, np.float32(eps),
    )  # fmt: skip
    return out


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE, in place, of `x` `[rows, heads, head_dim]`, the last two dense; cos and sin are
    `[rows, head_dim / 2]` float32."""
    rows, heads, dim = x.shape
    run = _turn_parallel if rows >= PARALLEL_ROWS else _turn
    run(x.data_ptr(), x.stride(0), cos.data_ptr(), sin.data_ptr(), rows, heads, dim)
    return x


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) · up of `[rows, 2 · width]`: `[rows, width]`."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, width), dtype=gate_up.dtype)
    run = _swiglu_parallel if rows >= PARALLEL_ROWS else _swiglu
    run(gate_up.data_ptr(), out.data_ptr(), rows, width)
    return out


def compiled() -> None:
    """Compile all of it, which takes seconds the first time, before there is a request."""
    for run in (_add_norm, _add_norm_parallel):
        run(0, 0, 0, 0, 0, 0, np.float32(1.0))  # of no rows
    for turn_ in (_turn, _turn_parallel):
        turn_(0, 0, 0, 0, 0, 0, 0)
    for swiglu_ in (_swiglu, _swiglu_parallel):
        swiglu_(0, 0, 0, 0)


@native
def _add_norm_row(
    row: int, hidden: int, delta: int, weight: int, out: int, width: int, eps: np.float32
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


@native
def _add_norm(
    hidden: int, delta: int, weight: int, out: int, rows: int, width: int, eps: np.float32
) -> None:
    for row in range(rows):
        _add_norm_row(row, hidden, delta, weight, out, width, eps)


@parallel
def _add_norm_parallel(
    hidden: int, delta: int, weight: int, out: int, rows: int, width: int, eps: np.float32
) -> None:
    for row in numba.prange(rows):
        _add_norm_row(row, hidden, delta, weight, out, width, eps)


@native
def _turn_row(row: int, qkv: int, stride: int, cos: int, sin: int, heads: int, dim: int) -> None:
    x, c, s = u16_at(qkv), f32_at(cos), f32_at(sin)
    half = dim // 2
    angle = row * half
    for head in range(heads):
        at = row * stride + head * dim
        for i in range(half):
            a, b = bf16(x[at + i]), bf16(x[at + half + i])
            x[at + i] = to_bf16(a * c[angle + i] - b * s[angle + i])
            x[at + half + i] = to_bf16(b * c[angle + i] + a * s[angle + i])


@native
def _turn(qkv: int, stride: int, cos: int, sin: int, rows: int, heads: int, dim: int) -> None:
    for row in range(rows):
        _turn_row(row, qkv, stride, cos, sin, heads, dim)


@parallel
def _turn_parallel(
    qkv: int, stride: int, cos: int, sin: int, rows: int, heads: int, dim: int
) -> None:
    for row in numba.prange(rows):
        _turn_row(row, qkv, stride, cos, sin, heads, dim)


@native
def _swiglu_row(row: int, gate_up: int, out: int, width: int) -> None:
    x, o = u16_at(gate_up), u16_at(out)
    gate, up, to = row * 2 * width, row * 2 * width + width, row * width
    for i in range(width):
        g = bf16(x[gate + i])
        # silu(g) = g / (1 + e^-g); e^-|g| never overflows
        e = exp(-abs(g))
        s = np.float32(1.0) / (np.float32(1.0) + e)
        s = s if g >= np.float32(0.0) else e * s
        o[to + i] = to_bf16(bf16(to_bf16(g * s)) * bf16(x[up + i]))


@native
def _swiglu(gate_up: int, out: int, rows: int, width: int) -> None:
    for row in range(rows):
        _swiglu_row(row, gate_up, out, width)


@parallel
def _swiglu_parallel(gate_up: int, out: int, rows: int, width: int) -> None:
    for row in numba.prange(rows):
        _swiglu_row(row, gate_up, out, width)
