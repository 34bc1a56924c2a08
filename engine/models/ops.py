"""What a layer does between its matrix products."""

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
    """`hidden` and what is like it are `[rows, width]`, of one dtype."""

    # (hidden, delta or None, weight [width], eps): `hidden += delta`, in place; its RMS norm
    add_norm: Callable[[Tensor, Tensor | None, Tensor, float], Tensor]
    # (x [rows, heads, head_dim], cos, sin [rows, head_dim / 2]): `x` turned, perhaps in place
    turn: Callable[[Tensor, Tensor, Tensor], Tensor]
    # [rows, 2 · width], gate and up: silu(gate) · up
    swiglu: Callable[[Tensor], Tensor]


@cache
def ops_for(dtype: torch.dtype, device: torch.device) -> Ops:
    """The fastest there are; in float32, those whose rows have the same bits in any batch."""
    if dtype == torch.bfloat16 and device.type == "cpu":
        try:
            from engine.kernels import elementwise as fused
        except (ImportError, RuntimeError) as error:  # or it has nowhere to keep what it compiles
            log.warning("bfloat16 is slow here: %s", error)
        else:
            return Ops(fused.add_norm, fused.turn, fused.swiglu)
    return Ops(_add_norm, _turn, _swiglu)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) over the last dimension, in float32, times `weight`."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def _add_norm(hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    if delta is not None:
        hidden += delta
    return rms_norm(hidden, weight, eps)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return rotate(x, cos.unsqueeze(1), sin.unsqueeze(1))


def _swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) · up.

    Torch's CPU `silu` computes the elements left over from its vector loop by a scalar function
    with other bits, and where such tails fall depends on the row count and the threads. `exp` has
    one result wherever an element lies (measured: 0 of 10⁶ differ, `silu` 4 %), and the rest of
    silu is correctly rounded in either loop.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    if gate.device.type != "cpu" or gate.dtype != torch.float32:
        return F.silu(gate) * up
    out = torch.neg(gate).exp_().add_(1)
    return torch.div(gate, out, out=out).mul_(up)
