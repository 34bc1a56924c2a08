"""The decoder shared by Llama, Mistral, Qwen2 and Qwen3: all of it, or one worker's part.

The decoder owns no keys and values. It calls `attention` of a cache once per layer and knows
nothing else about the cache. It is row-wise: every operation computes a token's row from that row
alone, in a way that does not depend on the number of rows. So in float32 a request's logits have
the same bits alone and in any batch. For this, callers must pass a multiple of four rows: `linear`
on CPU returns other bits for some other counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from engine.models.config import ModelConfig
from engine.models.linear import Int8Linear, Linear, OneDnnLinear, empty_weight, pack
from engine.models.ops import Ops, ops_for, rms_norm
from engine.models.part import Part, whole
from engine.models.rope import rope_table

__all__ = ["AttentionCache", "Sum", "Transformer"]

# Returns the sum, over the workers of a stage, of a tensor that each has a summand of. It may use
# the memory of the summand.
Sum = Callable[[Tensor], Tensor]


class AttentionCache(Protocol):
    """The part of a KV cache that the model calls."""

    def attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Append `k` and `v` to one layer and attend with `q`, for the rows of the current step.

        `q` is [T, num_heads, head_dim], `k` and `v` are [T, num_kv_heads, head_dim], after RoPE.
        Rows may be strided; the last two dimensions are dense. Returns [T, num_heads, head_dim].
        """
        ...


class Transformer(nn.Module):
    """The decoder, or a part of it. Built on the meta device: `allocate` it to copy weights in.

    The workers of a stage compute the same rows: each layer adds what they have computed (`sum`).
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        part: Part | None = None,
        sum_: Sum | None = None,
    ) -> None:
        """Without `part`, the whole model. A part of a stage with several workers needs `sum_`."""
        super().__init__()
        self.config = config
        self.part = part = part or whole(config)
        self.sum = sum_
        hidden, vocab, tied = config.hidden_size, len(part.vocab), config.tie_embeddings
        self.embed: Linear | None = None  # used for lookup of rows
        self.head: Linear | None = None
        if part.first:
            self.embed = Linear(hidden, vocab, bias=False, dtype=dtype)
        self.layers = nn.ModuleList(Layer(config, part, i, dtype, sum_) for i in part.layers)
        if part.last:
            self.norm = RMSNorm(hidden, eps=config.rms_norm_eps, dtype=dtype)
            shared = self.embed if tied else None
            self.head = shared or Linear(hidden, vocab, bias=False, dtype=dtype)
        self.eval()

    def allocate(self, device: torch.device) -> None:
        """Allocate every weight, uninitialized, on `device`, and compute the RoPE table."""
        # Not `to_empty`, which takes half a second to import sympy.
        for module in self.modules():
            for name, weight in list(module.named_parameters(recurse=False)):
                setattr(
                    module, name, empty_weight(*weight.shape, dtype=weight.dtype, device=device)
                )
        for name, table in zip(("cos", "sin"), rope_table(self.config), strict=True):
            self.register_buffer(name, table.to(device), persistent=False)

    def forward(self, tokens: Tensor, positions: Tensor, cache: AttentionCache) -> Tensor:
        """Return the hidden states after the final norm, [T, hidden]. For the whole model.

        `tokens` and `positions` are [T] int64; T is a multiple of four, positions are in
        [0, context_length). Padding rows may hold any token and position. They affect no other row,
        and the cache decides what `attention` does with them.
        """
        return self.run(self.embedded(tokens), positions, cache)

    def embedded(self, tokens: Tensor) -> Tensor:
        """Return the embeddings of tokens, [T, hidden]. For the first stage."""
        if self.embed is None:
            raise TypeError("this part has no embedding")
        if self.sum is None:
            return self.embed.rows(tokens)
        vocab = self.part.vocab
        own = (tokens >= vocab.start) & (tokens < vocab.stop)
        rows = self.embed.rows((tokens - vocab.start).where(own, 0))
        return self.sum(rows.masked_fill_(~own.unsqueeze(1), 0))

    def run(self, hidden: Tensor, positions: Tensor, cache: AttentionCache) -> Tensor:
        """Apply the layers of this part to `hidden`, [T, hidden], and in the last stage the final
        norm.

        `hidden` may be overwritten.
        """
        cos, sin = self.cos[positions], self.sin[positions]
        ops = ops_for(hidden.dtype, hidden.device)
        delta = None
        for layer in self.layers:
            delta = layer(hidden, delta, cos, sin, cache, ops)
        if self.part.last:
            return ops.add_norm(hidden, delta, self.norm.weight, self.norm.eps)
        return hidden if delta is None else hidden.add_(delta)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [R, vocab] float32 of hidden states [R, hidden]; R is a multiple of 4.

        A part of the last stage returns those of its own range of the vocabulary.
        """
        if self.head is None:
            raise TypeError("this part computes no logits")
        logits: Tensor = self.head(hidden)
        return logits.float()

    def pack(self) -> None:
        """Pack all weights for the fastest matrix products. Only on CPUs."""
        self._replace_linears(pack)

    def quantize(self) -> None:
        """Quantize all weights of matrix products to int8. Only in bfloat16 on CPUs."""
        self._replace_linears(Int8Linear)

    def _replace_linears(self, convert: Callable[[Linear], Linear]) -> None:
        """Replace every `Linear` by its conversion.

        Tied embeddings use the converted head for lookup too, if it has rows, so that the weight is
        not stored twice.
        """
        for layer in self.layers:
            for name, child in list(layer.named_children()):
                if isinstance(child, Linear):
                    setattr(layer, name, convert(child))
        if self.head is None:
            return
        tied = self.head is self.embed
        self.head = convert(self.head)
        if tied and not isinstance(self.head, OneDnnLinear):
            self.embed = self.head


class Layer(nn.Module):
    """Pre-norm attention and MLP with residuals; q, k, v and gate, up are fused projections."""

    attention_norm: RMSNorm
    mlp_norm: RMSNorm

    def __init__(
        self, config: ModelConfig, part: Part, index: int, dtype: torch.dtype, sum_: Sum | None
    ) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.index = index
        self.sum = sum_
        self.heads = len(part.heads)
        self.rotated = self.heads + len(part.kv_heads)  # q and k, rotated in one call
        self.head_dim = config.head_dim
        rows = (self.rotated + len(part.kv_heads)) * config.head_dim
        width = self.heads * config.head_dim

        self.attention_norm = RMSNorm(hidden, eps=eps, dtype=dtype)
        self.qkv = Linear(hidden, rows, bias=config.attention_bias, dtype=dtype)
        # The weight is repeated per head (q's are equal, k's are equal): one call norms all heads.
        self.qk_norm = (
            RMSNorm(self.rotated, config.head_dim, eps=eps, dtype=dtype) if config.qk_norm else None
        )
        self.out = Linear(width, hidden, bias=config.output_bias and part.leads, dtype=dtype)
        self.mlp_norm = RMSNorm(hidden, eps=eps, dtype=dtype)
        self.gate_up = Linear(hidden, 2 * len(part.inner), bias=False, dtype=dtype)
        self.down = Linear(len(part.inner), hidden, bias=False, dtype=dtype)

    def forward(
        self,
        hidden: Tensor,
        delta: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        cache: AttentionCache,
        ops: Ops,
    ) -> Tensor:
        """Apply the layer to `hidden` + `delta`, both [T, hidden].

        Updates `hidden` in place and returns the next delta, which the next layer adds. `cos` and
        `sin` are [T, head_dim / 2].
        """
        norm = self.attention_norm
        qkv = self.qkv(ops.add_norm(hidden, delta, norm.weight, norm.eps))
        qkv = qkv.view(len(qkv), -1, self.head_dim)
        qk, v = qkv[:, : self.rotated], qkv[:, self.rotated :]
        if self.qk_norm is not None:
            qk = self.qk_norm(qk)
        qk = ops.rotate(qk, cos, sin)
        attended = cache.attention(self.index, qk[:, : self.heads], qk[:, self.heads :], v)
        norm = self.mlp_norm
        out: Tensor = self.out(attended.flatten(1))
        if self.sum is not None:
            out = self.sum(out)
        normed = ops.add_norm(hidden, out, norm.weight, norm.eps)
        out = self.down(ops.swiglu(self.gate_up(normed)))
        return out if self.sum is None else self.sum(out)


class RMSNorm(nn.Module):
    """RMS norm over the last dimension, in float32, times a weight of the given shape."""

    def __init__(self, *shape: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = empty_weight(*shape, dtype=dtype)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)
