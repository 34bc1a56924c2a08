"""Rotary position embedding (RoPE): the table of angles, and the rotation."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine.models.config import (
    FrequencyFactors,
    LinearScaling,
    Llama3Scaling,
    ModelConfig,
    Rope,
    YarnScaling,
)

__all__ = ["rope_table", "rotate"]


def rope_table(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Return cos and sin of all angles, each [context_length, head_dim / 2] float32, on the CPU.

    All arithmetic is in float32, as in transformers, so that logits agree.
    """
    frequencies, scale = _frequencies(config.rope, config.head_dim)
    angles = torch.outer(torch.arange(config.context_length, dtype=torch.float32), frequencies)
    return angles.cos().mul_(scale), angles.sin_().mul_(scale)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `x` [T, heads, head_dim]; `cos` and `sin` are [T, 1, head_dim / 2] float32.

    The rotated pairs are (i, i + head_dim / 2), as in Hugging Face's layout of the weights.
    """
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def _frequencies(rope: Rope, dim: int) -> tuple[Tensor, float]:
    """Return radians per position, [dim / 2] float32, and the factor of cos and sin."""
    plain = 1.0 / (rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    match rope.scaling:
        case None:
            return plain, 1.0
        case LinearScaling(factor):
            return plain / factor, 1.0
        case FrequencyFactors(factors):
            return plain / torch.tensor(factors, dtype=torch.float32), 1.0
        case Llama3Scaling() as scaling:
            return _llama3(plain, scaling), 1.0
        case YarnScaling() as scaling:
            return _yarn(plain, scaling, rope.theta, dim), scaling.attention_factor


def _llama3(plain: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Divide low frequencies by `factor`, keep high ones, and interpolate between."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    wavelength = 2 * math.pi / plain
    smooth = ((scaling.original_context / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * plain / scaling.factor + smooth * plain


def _yarn(plain: Tensor, scaling: YarnScaling, theta: float, dim: int) -> Tensor:
    """YaRN (arXiv 2309.00071): a ramp over dimensions from extrapolation to interpolation."""

    def dimension(rotations: float) -> float:
        """Return the dimension that makes this many rotations over the original context."""
        wavelength_ratio = scaling.original_context / (rotations * 2 * math.pi)
        return dim * math.log(wavelength_ratio) / (2 * math.log(theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # avoids division by zero
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain / scaling.factor * ramp + plain * (1 - ramp)
