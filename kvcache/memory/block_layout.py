"""The layout of a pool whose blocks are opaque: another engine's memory, as vLLM allocates it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from kvcache.errors import BadAddress
from kvcache.shard import Shard

__all__ = ["BlockLayout"]


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """`pages` blocks in `layers` layers; what a block holds inside of a layer is not known here.

    The order of the bytes within a block may depend on the processor, so blocks are copied whole.
    Two pools can exchange blocks if their engines have equal fingerprints.
    """

    layers: int
    pages: int  # blocks, with the one that the engine keeps for padding
    page_size: int  # tokens of a block
    layer_bytes: int  # of one block in one layer
    by_block: bool  # whether all layers of a block are contiguous, or all blocks of a layer

    @property
    def dtype(self) -> torch.dtype:
        """Of the pool as `view` returns it."""
        return torch.int8

    @property
    def page_bytes(self) -> int:
        """Bytes of one block in all layers."""
        return self.layers * self.layer_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of the whole pool."""
        return self.pages * self.page_bytes

    @property
    def block_stride(self) -> int:
        """Bytes from a block to the next one in the same layer."""
        return self.page_bytes if self.by_block else self.layer_bytes

    @property
    def layer_stride(self) -> int:
        """Bytes from a layer to the next one of the same block."""
        return self.layer_bytes if self.by_block else self.pages * self.layer_bytes

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """Return `memory`, `nbytes` bytes in one dimension."""
        return memory

    @property
    def shards(self) -> tuple[Shard, ...]:
        return ()

    def of_peer(self, shards: Sequence[Shard]) -> BlockLayout:
        """Return the layout of a peer, except for its pages. Raises `BadAddress` for shards."""
        if shards:
            raise BadAddress("these blocks cannot be split between workers", param="kv_addr")
        return self

    def with_pages(self, pages: int) -> BlockLayout:
        """Return the same layout with another number of blocks."""
        return replace(self, pages=pages)
