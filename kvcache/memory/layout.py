"""The shape of a pool, and a fingerprint that is equal where two pools can exchange KV."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Protocol

import torch

from kvcache.shard import Shard

__all__ = ["KVLayout", "PoolLayout", "SplitLayout"]


class PoolLayout(Protocol):
    """What regions and transports need to know of a pool's layout."""

    @property
    def pages(self) -> int: ...
    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        ...

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def shards(self) -> tuple[Shard, ...]:
        """The parts of the model in the pool, one behind the other; empty: all of it as one."""
        ...

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """Return `memory`, `nbytes` bytes in one dimension of this dtype, in the pool's shape."""
        ...

    def of_peer(self, shards: Sequence[Shard]) -> PoolLayout:
        """Return the layout of a peer with these parts of the model, except for its pages."""
        ...

    def with_pages(self, pages: int) -> PoolLayout:
        """Return the same layout with another number of pages."""
        ...


@dataclass(frozen=True, slots=True)
class KVLayout:
    """`[layers, pages, 2, page_size, kv_heads, head_dim]`: FlashInfer's NHD layout, per layer.

    In the third dimension, index 0 holds keys (after RoPE, at absolute positions) and index 1
    values. Page 0 is the scratch page: always zero and never owned; gathers pad with it. A worker
    with a shard of the model has a pool of that shard's layers and heads.

    In memory the pages are the outer dimension: all layers of a page are contiguous, so a put
    copies a page as one run of bytes. One layer of the pool is a strided view.
    """

    layers: int  # of the model
    pages: int
    page_size: int
    kv_heads: int  # of the model
    head_dim: int
    dtype: torch.dtype
    shard: Shard | None = None  # the part of the model in the pool; None: all

    @property
    def held(self) -> Shard:
        """The layers and heads of the model in the pool."""
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
        """Return `memory`, `nbytes` bytes in one dimension of this dtype, viewed as `shape`."""
        layers, pages, *page = self.shape
        return memory.view(pages, layers, *page).transpose(0, 1)

    @property
    def shards(self) -> tuple[Shard, ...]:
        return () if self.shard is None else (self.shard,)

    def of_peer(self, shards: Sequence[Shard]) -> KVLayout | SplitLayout:
        """Return the layout of a peer with these parts of the model, except for its pages."""
        if len(shards) > 1:
            return SplitLayout(replace(self, shard=None), tuple(shards))
        return replace(self, shard=shards[0] if shards else None)

    def with_pages(self, pages: int) -> KVLayout:
        """Return the same layout with another number of pages."""
        return replace(self, pages=pages)

    def pages_for(self, tokens: int) -> int:
        """Return the number of pages for `tokens` tokens."""
        return -(-tokens // self.page_size)

    def fingerprint(self, weights: str) -> str:
        """Return a digest, equal on two engines if and only if they can use each other's pages.

        `weights` is a digest of the weights and of all else that determines keys and values (RoPE).
        The fingerprint covers neither the number of pages, because pools may differ in size, nor
        the shard, because puts route each layer and head between different splits
        (`kvcache.shard`).
        """
        text = (
            f"page-nhd|{self.layers}|{self.page_size}|{self.kv_heads}|{self.head_dim}"
            f"|{self.dtype}|{weights}"
        )
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class SplitLayout:
    """The pool of an engine that is split over workers: their parts, one behind the other.

    All parts have the same pages. A part is near the worker that computes it: on a host with
    several NUMA nodes, memory lies where it is first written.
    """

    whole: KVLayout  # of the model, without a shard
    shards: tuple[Shard, ...]  # they hold each layer and KV head once, as after `split`

    @property
    def pages(self) -> int:
        return self.whole.pages

    @property
    def page_size(self) -> int:
        return self.whole.page_size

    @property
    def dtype(self) -> torch.dtype:
        return self.whole.dtype

    @property
    def parts(self) -> list[tuple[int, KVLayout]]:
        """Where each part begins in the pool, in bytes, and its layout."""
        layouts = [replace(self.whole, shard=shard) for shard in self.shards]
        begins = accumulate((layout.nbytes for layout in layouts), initial=0)
        return list(zip(begins, layouts, strict=False))

    @property
    def nbytes(self) -> int:
        return sum(layout.nbytes for _, layout in self.parts)

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """Return `memory` as it is; `views` has the parts."""
        return memory

    def views(self, pool: torch.Tensor) -> list[torch.Tensor]:
        """Return the parts of a pool, each in its `KVLayout.shape`."""
        size = self.dtype.itemsize
        return [
            layout.view(pool[begin // size : (begin + layout.nbytes) // size])
            for begin, layout in self.parts
        ]

    def of_peer(self, shards: Sequence[Shard]) -> KVLayout | SplitLayout:
        """Return the layout of a peer with these parts of the model, except for its pages."""
        return self.whole.of_peer(shards)

    def with_pages(self, pages: int) -> SplitLayout:
        """Return the same layout with another number of pages."""
        return replace(self, whole=self.whole.with_pages(pages))
