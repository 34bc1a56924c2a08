"""The shape of a pool, and the fingerprint that says whether KV can travel between two."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

from kvcache.shard import Shard

__all__ = ["KVLayout"]


@dataclass(frozen=True, slots=True)
class KVLayout:
    """`[layers, pages, 2, page_size, kv_heads, head_dim]`: FlashInfer's NHD layout, per layer.

    Index 2 is 0 for keys (after RoPE, so positions are absolute) and 1 for values. Page 0 is a
    scratch page: always zero, never owned; gathers pad with it. The pool of a worker that has a
    part of the model only has that part's layers and heads.

    In memory a page comes before a layer: what a page has in all layers lies together, so that it
    travels as one run of bytes however scattered the pages are. A layer is a view with strides.
    """

    layers: int  # of the model
    pages: int
    page_size: int
    kv_heads: int  # of the model
    head_dim: int
    dtype: torch.dtype
    shard: Shard | None = None  # the part that the pool is for; None: all

    @property
    def held(self) -> Shard:
        """The layers and heads that the pool is for."""
        return self.shard or Shard(0, self.layers, 0, self.kv_heads)

    @property
    def shape(self) -> tuple[int, int, int, int, int, int]:
        held = self.held
        return (held.layers, self.pages, 2, self.page_size, held.heads, self.head_dim)

    @property
    def head_bytes(self) -> int:
        """Bytes of one head's key, or value, of one token in one layer."""
        return self.head_dim * self.dtype.itemsize

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values in one layer."""
        return 2 * self.held.heads * self.head_bytes

    @property
    def layer_bytes(self) -> int:
        """Bytes of one page in one layer."""
        return self.page_size * self.token_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in all layers."""
        return self.held.layers * self.layer_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of the whole pool."""
        return self.pages * self.page_bytes

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """`memory`, `nbytes` of this dtype in one dimension, as a pool of `shape`."""
        layers, pages, *page = self.shape
        return memory.view(pages, layers, *page).transpose(0, 1)

    def pages_for(self, tokens: int) -> int:
        """Pages that `tokens` tokens take."""
        return -(-tokens // self.page_size)

    def fingerprint(self, weights: str) -> str:
        """Equal on two engines iff a page of one means the same on the other.

        `weights` is a digest of the weights and of what else shapes keys and values (RoPE). Left
        out are the number of pages, since pools may differ in size, and the shard: between two
        splits of a model each layer and head goes where it belongs (`kvcache.shard`).
        """
        what = (
            f"page-nhd|{self.layers}|{self.page_size}|{self.kv_heads}|{self.head_dim}"
            f"|{self.dtype}|{weights}"
        )
        return hashlib.blake2b(what.encode(), digest_size=16).hexdigest()
