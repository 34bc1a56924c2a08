"""`ModelConfig`: everything that distinguishes Llama-like decoders, except weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.models.errors import CorruptModel

__all__ = [
    "Architecture",
    "FrequencyFactors",
    "LinearScaling",
    "Llama3Scaling",
    "ModelConfig",
    "Rope",
    "Scaling",
    "YarnScaling",
]

Architecture = Literal["llama", "mistral", "qwen2", "qwen3"]


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Position interpolation: every frequency is divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1: low frequencies are divided by `factor`, high ones kept, with a ramp between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071): NTK-by-parts; cos and sin are multiplied by `attention_factor`."""

    factor: float
    original_context: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class FrequencyFactors:
    """Frequency i is divided by `factors[i]`; GGUF files describe Llama 3's scaling in this way."""

    factors: tuple[float, ...]


Scaling = LinearScaling | Llama3Scaling | YarnScaling | FrequencyFactors


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding over the whole head, with base `theta` and optional scaling."""

    theta: float
    scaling: Scaling | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The dimensions and options of one model.

    `context_length` (tokens) is already capped to `sliding_window` if the model uses one. Within
    this length a window masks nothing, and the cache does not support windows.

    Raises: `CorruptModel` if the numbers contradict each other.
    """

    architecture: Architecture
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    rms_norm_eps: float
    rope: Rope
    tie_embeddings: bool
    attention_bias: bool
    qk_norm: bool
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "context_length",
        ):
            size = getattr(self, name)
            if not 1 <= size <= MAX_SIZE:
                raise CorruptModel(f"{name} is {size}; it must be between 1 and {MAX_SIZE}")
        if self.num_heads % self.num_kv_heads:
            raise CorruptModel(
                f"{self.num_heads} query heads cannot share {self.num_kv_heads} key-value heads"
            )
        if self.head_dim % 2:
            raise CorruptModel(f"head_dim is {self.head_dim}; RoPE rotates pairs")
        if not self.rope.theta > 1:
            raise CorruptModel(f"RoPE's theta is {self.rope.theta}; it must be above 1")

    @property
    def output_bias(self) -> bool:
        """Whether the output projection of attention has a bias; in Qwen2 only q, k and v have."""
        return self.attention_bias and self.architecture != "qwen2"


MAX_SIZE = 1 << 24  # above any real dimension, below what a damaged header may contain
