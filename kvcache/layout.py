"""The shape of a pool, and the fingerprint that says whether KV can travel between two."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

__all__ = ["KVLayout"]


@dataclass(frozen=True, slots=True)
class KVLayout:
    """`[layers, pages, 2, page_size, kv_heads, head_dim]`: FlashInfer's NHD layout, per layer.

    Index 2 is 0 for keys (after RoPE, so positions are absolute) and 1 for values. Page 0 is a
    scratch page: always zero, never owned; gathers pad with it.
    """

    layers: int
    pages: int
    page_size: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, int, int, int, int, int]:
        return (self.layers, self.pages, 2, self.page_size, self.kv_heads, self.head_dim)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values in one layer."""
        return 2 * self.kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in all layers."""
        return self.layers * self.page_size * self.token_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of the whole pool."""
        return self.pages * self.page_bytes

    def pages_for(self, tokens: int) -> int:
        """Pages that `tokens` tokens take."""
        return -(-tokens // self.page_size)

    def fingerprint(self, weights: str) -> str:
        """Equal on two engines iff a page of one means the same on the other.

        `weights` is a digest of the weights and of what else shapes keys and values (RoPE). The
        number of pages is left out: pools may differ in size.
        """
        what = (
            f"nhd|{self.layers}|{self.page_size}|{self.kv_heads}|{self.head_dim}"
            f"|{self.dtype}|{weights}"
        )
        return hashlib.blake2b(what.encode(), digest_size=16).hexdigest()
