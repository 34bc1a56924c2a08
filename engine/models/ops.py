"""The operations of a layer between its matrix products."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.models.rope import rotate

__all__ = ["Ops", "ops_for", "rms_norm"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ops:
    """Implementations for one dtype and device; activations are `[rows, width]`."""

    # (hidden, delta or None, weight [width], eps): hidden += delta in place; returns its RMS norm
    add_norm: Callable[[Tensor, Tensor | None, Tensor, float], Tensor]
    # (x [rows, heads, head_dim], cos, sin [rows, head_dim / 2]): RoPE of x, possibly in place
    rotate: Callable[[Tensor, Tensor, Tensor], Tensor]
    # (gate_up [rows, 2 · width]): silu(gate) · up, [rows, width]
    swiglu: Callable[[Tensor], Tensor]


@cache
def ops_for(dtype: torch.dtype, device: torch.device) -> Ops:
    """Return the fastest operations; in float32, the ones that are bit-stable in any batch."""
    if dtype != torch.float32 and device.type == "cuda":
        try:
            from engine.kernels import elementwise_cuda as on_gpu
        except ImportError as error:
            log.warning("decodes are slow here: %s", error)
        else:
            return Ops(on_gpu.add_norm, on_gpu.apply_rope, on_gpu.swiglu)
    if dtype == torch.bfloat16 and device.type == "cpu":
        try:
            from engine.kernels import elementwise as fused
        except (ImportError, RuntimeError) as error:  # RuntimeError: numba's cache is not writable
            log.warning("bfloat16 is slow here: %s", error)
        else:
            return Ops(fused.add_norm, fused.apply_rope, fused.swiglu)
    return Ops(_add_norm, _apply_rope, _swiglu)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / rms(x) over the last dimension, computed in float32, times `weight`."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def _add_norm(hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    if delta is not None:
        hidden += delta
    return rms_norm(hidden, weight, eps)


def _apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return rotate(x, cos.unsqueeze(1), sin.unsqueeze(1))


def _swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(gate) · up.

    Torch's CPU `silu` computes the remainder of its vector loop with a scalar function that rounds
    differently, and the position of the remainder depends on the row count and the threads. `exp`
    returns the same bits wherever an element lies (measured: 0 of 10⁶ differ; for `silu` 4 %), and
    the other operations of silu are correctly rounded in either loop.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    if gate.device.type != "cpu" or gate.dtype != torch.float32:
        return F.silu(gate) * up
    out = torch.neg(gate).exp_().add_(1)
    return torch.div(gate, out, out=out).mul_(up)
