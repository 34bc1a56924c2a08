"""The one decoder that Llama, Mistral, Qwen2 and Qwen3 share.

It owns no keys and values: it calls `attention` of a cache, once per layer, and knows nothing else
of it. And it is row-wise: every operation computes a token's row from that row alone, in a way that
does not depend on how many rows there are, so that in float32 a request's logits have the same bits
alone and in any batch. The caller upholds its half by passing a multiple of four rows: `linear` on
CPU gives other bits for some other counts.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.models.config import ModelConfig
from engine.models.rope import rope_table, rotate

__all__ = ["AttentionCache", "Transformer"]


class AttentionCache(Protocol):
    """What the model needs of a KV cache."""

    def attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Append `k` and `v` and attend with `q`, for the rows of the step that was begun.

        `q` [T, num_heads, head_dim], `k` and `v` [T, num_kv_heads, head_dim], after RoPE; rows may
        be strided, the last two dimensions are dense. Returns [T, num_heads, head_dim].
        """
        ...


class Transformer(nn.Module):
    """The decoder, built without memory: `allocate` gives it some, then weights are copied in."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.embed = _weight(config.vocab_size, config.hidden_size, dtype=dtype)
        self.layers = nn.ModuleList(Layer(config, i, dtype) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
        tied = config.tie_embeddings
        self.head = None if tied else _weight(config.vocab_size, config.hidden_size, dtype=dtype)
        self.eval()

    def allocate(self, device: torch.device) -> None:
        """Give every weight (uninitialized) memory on `device`, and compute the RoPE table."""
        # `to_empty` would do, after half a second of importing sympy.
        for module in self.modules():
            for name, weight in list(module.named_parameters(recurse=False)):
                setattr(module, name, _weight(*weight.shape, dtype=weight.dtype, device=device))
        for name, table in zip(("cos", "sin"), rope_table(self.config), strict=True):
            self.register_buffer(name, table.to(device), persistent=False)

    def forward(self, tokens: Tensor, positions: Tensor, cache: AttentionCache) -> Tensor:
        """Hidden states after the final norm, [T, hidden].

        `tokens` and `positions` are [T] int64, T a multiple of four; positions lie in
        [0, context_length). Padding rows may hold any token and position: they touch no other row,
        and what becomes of them in `attention` is the cache's business.
        """
        hidden = F.embedding(tokens, self.embed)
        cos, sin = self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)
        for layer in self.layers:
            hidden = layer(hidden, cos, sin, cache)
        out: Tensor = self.norm(hidden)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [R, vocab] float32 of hidden states [R, hidden], R a multiple of four."""
        weight = self.embed if self.head is None else self.head
        return F.linear(hidden, weight).float()


class Layer(nn.Module):
    """Attention and MLP, each behind a norm and around a residual; projections are fused."""

    def __init__(self, config: ModelConfig, index: int, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.index = index
        self.heads = config.num_heads
        self.turned = config.num_heads + config.num_kv_heads  # RoPE turns q and k as one
        self.head_dim = config.head_dim
        rows = (self.turned + config.num_kv_heads) * config.head_dim
        width = config.num_heads * config.head_dim

        self.attention_norm = RMSNorm(hidden, eps=eps, dtype=dtype)
        self.qkv = Linear(hidden, rows, bias=config.attention_bias, dtype=dtype)
        # One weight per head, all of q's alike and all of k's, so that one call norms them all.
        self.qk_norm = (
            RMSNorm(self.turned, config.head_dim, eps=eps, dtype=dtype) if config.qk_norm else None
        )
        self.out = Linear(width, hidden, bias=config.output_bias, dtype=dtype)
        self.mlp_norm = RMSNorm(hidden, eps=eps, dtype=dtype)
        self.gate_up = Linear(hidden, 2 * config.intermediate_size, bias=False, dtype=dtype)
        self.down = Linear(config.intermediate_size, hidden, bias=False, dtype=dtype)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, cache: AttentionCache) -> Tensor:
        """`hidden` [T, hidden] through this layer; cos and sin [T, 1, head_dim / 2]."""
        qkv = self.qkv(self.attention_norm(hidden)).unflatten(-1, (-1, self.head_dim))
        qk, v = qkv[:, : self.turned], qkv[:, self.turned :]
        if self.qk_norm is not None:
            qk = self.qk_norm(qk)
        qk = rotate(qk, cos, sin)
        attended = cache.attention(self.index, qk[:, : self.heads], qk[:, self.heads :], v)
        hidden = hidden + self.out(attended.flatten(1))
        gate, up = self.gate_up(self.mlp_norm(hidden)).chunk(2, dim=-1)
        out: Tensor = hidden + self.down(_swiglu(gate, up))
        return out


class Linear(nn.Module):
    """x · weightᵀ + bias. Torch's own would first draw random weights, only to be overwritten."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = _weight(outputs, inputs, dtype=dtype)
        self.bias = _weight(outputs, dtype=dtype) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class RMSNorm(nn.Module):
    """x / rms(x) over the last dimension, in float32, times a weight of the given shape."""

    def __init__(self, *shape: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = _weight(*shape, dtype=dtype)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up.

    Torch's CPU `silu` computes the elements left over from its vector loop by a scalar function
    with other bits, and where such tails fall depends on the row count and the threads. `exp` has
    one result wherever an element lies (measured: 0 of 10⁶ differ, `silu` 4 %), and the rest of
    silu is correctly rounded in either loop.
    """
    if gate.device.type != "cpu" or gate.dtype != torch.float32:
        return F.silu(gate) * up
    out = torch.neg(gate).exp_().add_(1)
    return torch.div(gate, out, out=out).mul_(up)


def _weight(*shape: int, dtype: torch.dtype, device: torch.device | str = "meta") -> nn.Parameter:
    """A weight without values; on the meta device without memory too."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
