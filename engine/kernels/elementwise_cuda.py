"""Element-wise operations between a layer's matrix products: 16-bit on GPUs, one kernel each.

Torch needs several kernels for each of them, and a decode of few rows takes no longer than their
launches. Arithmetic is in float32 and rounds wherever torch's own operations would.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["add_norm", "apply_rope", "swiglu"]

SWIGLU_BLOCK = 1024


def add_norm(hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Add `delta` to `hidden` in place, both `[rows, width]`; return the RMS norm of the sum.

    The norm is `hidden` divided by its root mean square, times `weight`, `[width]`.
    """
    rows, width = hidden.shape
    out = torch.empty_like(hidden)
    block = triton.next_power_of_2(width)
    _add_norm[(rows,)](
        hidden, hidden if delta is None else delta, weight, out, eps, width, block,
        adds=delta is not None, num_warps=min(max(block // 256, 1), 16),
    )  # fmt: skip
    return out


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE to `x`, `[rows, heads, head_dim]`, in place; its last two dimensions are dense.

    `cos` and `sin` are `[rows, head_dim / 2]` float32.
    """
    rows, heads, dim = x.shape
    half = dim // 2
    _rope[(rows,)](
        x, cos, sin, x.stride(0), half, heads * half, triton.next_power_of_2(heads * half)
    )
    return x


def swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(gate) · up, `[rows, width]`; `gate_up` is `[rows, 2 · width]`."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    _swiglu[(rows, triton.cdiv(width, SWIGLU_BLOCK))](gate_up, out, width, SWIGLU_BLOCK)
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _add_norm(  # type: ignore[no-untyped-def]
    hidden, delta, weight, out, eps,
    width: tl.constexpr, block: tl.constexpr, adds: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, block)
    inside = at < width
    row = tl.program_id(0).to(tl.int64) * width
    x = tl.load(hidden + row + at, mask=inside, other=0.0)
    if adds:
        x = (x.to(tl.float32) + tl.load(delta + row + at, mask=inside, other=0.0)).to(x.dtype)
        tl.store(hidden + row + at, x, mask=inside)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)
    normed = (wide * scale).to(x.dtype)
    scaled = normed.to(tl.float32) * tl.load(weight + at, mask=inside, other=0.0)
    tl.store(out + row + at, scaled.to(x.dtype), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _rope(  # type: ignore[no-untyped-def]
    x, cos, sin, stride,
    half: tl.constexpr, pairs: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, block)
    inside = at < pairs
    angle = at % half
    first = x + row * stride + at // half * (2 * half) + angle
    a = tl.load(first, mask=inside, other=0.0)
    b = tl.load(first + half, mask=inside, other=0.0)
    c = tl.load(cos + row * half + angle, mask=inside, other=0.0)
    s = tl.load(sin + row * half + angle, mask=inside, other=0.0)
    tl.store(first, (a * c - b * s).to(a.dtype), mask=inside)
    tl.store(first + half, (b * c + a * s).to(a.dtype), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _swiglu(gate_up, out, width, block: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    inside = at < width
    gate = tl.load(gate_up + row * 2 * width + at, mask=inside, other=0.0)
    up = tl.load(gate_up + row * 2 * width + width + at, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    gated = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    tl.store(out + row * width + at, (gated.to(tl.float32) * up).to(gate.dtype), mask=inside)
