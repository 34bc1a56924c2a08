"""The one decoder that Llama, Mistral, Qwen2 and Qwen3 share.

It owns no keys and values: it calls `attention` of a cache, once per layer, and knows nothing else
of it. And it is row-wise: every operation computes a token's row from that row alone, in a way that
does not depend on how many rows there are, so that in float32 a request's logits have the same bits
alone and in any batch. The caller upholds its half by passing a multiple of four rows: `linear` on
CPU gives other bits for some other counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from engine.models.config import ModelConfig
from engine.models.linear import Int8Linear, Linear, OneDnnLinear, empty_weight, packed
from engine.models.ops import Ops, ops_for, rms_norm
from engine.models.rope import rope_table

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
        hidden, vocab = config.hidden_size, config.vocab_size
        self.embed = Linear(hidden, vocab, bias=False, dtype=dtype)  # its rows are looked up
        self.layers = nn.ModuleList(Layer(config, i, dtype) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
        tied = config.tie_embeddings
        self.head = self.embed if tied else Linear(hidden, vocab, bias=False, dtype=dtype)
        self.eval()

    def allocate(self, device: torch.device) -> None:
        """Give every weight (uninitialized) memory on `device`, and compute the RoPE table."""
        # `to_empty` would do, after half a second of importing sympy.
        for module in self.modules():
            for name, weight in list(module.named_parameters(recurse=False)):
                setattr(
                    module, name, empty_weight(*weight.shape, dtype=weight.dtype, device=device)
                )
        for name, table in zip(("cos", "sin"), rope_table(self.config), strict=True):
            self.register_buffer(name, table.to(device), persistent=False)

    def forward(self, tokens: Tensor, positions: Tensor, cache: AttentionCache) -> Tensor:
        """Hidden states after the final norm, [T, hidden].

        `tokens` and `positions` are [T] int64, T a multiple of four; positions lie in
        [0, context_length). Padding rows may hold any token and position: they touch no other row,
        and what becomes of them in `attention` is the cache's business.
        """
        hidden = self.embed.rows(tokens)
        cos, sin = self.cos[positions], self.sin[positions]
        ops = ops_for(hidden.dtype, hidden.device)
        delta = None
        for layer in self.layers:
            delta = layer(hidden, delta, cos, sin, cache, ops)
        return ops.add_norm(hidden, delta, self.norm.weight, self.norm.eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [R, vocab] float32 of hidden states [R, hidden], R a multiple of four."""
        logits: Tensor = self.head(hidden)
        return logits.float()

    def pack(self) -> None:
        """Lay the weights out as the matrix products want them: on CPU, in bfloat16."""
        self._multiply_by(packed)

    def quantize(self) -> None:
        """Round the weights of all matrix products to int8: on CPU, in bfloat16."""
        self._multiply_by(Int8Linear)

    def _multiply_by(self, kind: Callable[[Linear], Linear]) -> None:
        """Of tied embeddings the rows are looked up in what the head has, if they can be, so that
        there is no second copy."""
        tied = self.head is self.embed
        for layer in self.layers:
            for name, child in list(layer.named_children()):
                if isinstance(child, Linear):
                    setattr(layer, name, kind(child))
        self.head = kind(self.head)
        if tied and not isinstance(self.head, OneDnnLinear):
            self.embed = self.head


class Layer(nn.Module):
    """Attention and MLP, each behind a norm and around a residual; projections are fused."""

    attention_norm: RMSNorm
    mlp_norm: RMSNorm

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

    def forward(
        self,
        hidden: Tensor,
        delta: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        cache: AttentionCache,
        ops: Ops,
    ) -> Tensor:
        """`hidden` [T, hidden], to which `delta` is still to be added, through this layer.

        It is changed in place; what is to be added to it then is returned. cos and sin are
        [T, head_dim / 2].
        """
        norm = self.attention_norm
        qkv = self.qkv(ops.add_norm(hidden, delta, norm.weight, norm.eps))
        qkv = qkv.view(len(qkv), -1, self.head_dim)
        qk, v = qkv[:, : self.turned], qkv[:, self.turned :]
        if self.qk_norm is not None:
            qk = self.qk_norm(qk)
        qk = ops.turn(qk, cos, sin)
        attended = cache.attention(self.index, qk[:, : self.heads], qk[:, self.heads :], v)
        norm = self.mlp_norm
        normed = ops.add_norm(hidden, self.out(attended.flatten(1)), norm.weight, norm.eps)
        out: Tensor = self.down(ops.swiglu(self.gate_up(normed)))
        return out


class RMSNorm(nn.Module):
    """x / rms(x) over the last dimension, in float32, times a weight of the given shape."""

    def __init__(self, *shape: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = empty_weight(*shape, dtype=dtype)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)
