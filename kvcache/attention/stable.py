"""Paged attention on any torch device, bit-stable in float32.

The result of a query row must depend neither on the rest of the batch nor on the chunks of the
prompt. Otherwise the same request would yield different tokens under another strategy. Tiles of
query rows over absolute blocks of keys make it so: see `kvcache.attention.tiles`. It is also the
same to the bit where other engines hold some of the blocks: see `kvcache.attention.distributed`.
On CPUs a kernel does the same faster: see `kvcache.attention.stable_cpu`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvcache.attention.block_tree import BLOCK, root
from kvcache.attention.plan import AppendedRows
from kvcache.attention.tiles import QUERY_TILE, QueryRows, Tile, attend_tile, by_rows, tile_queries
from kvcache.sequences import Span

__all__ = ["StablePlan"]


class StablePlan:
    """The bit-stable `Plan`; see the module's docstring."""

    def __init__(
        self, spans: Sequence[Span], page_size: int, group: int, device: torch.device
    ) -> None:
        self._rows = AppendedRows(spans, page_size, device)
        self._tiles = _plan_tiles(spans, page_size, group, device)

    def append(self, pages: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """See `Plan.append`."""
        self._rows.append(pages, k, v)

    def attend(self, pages: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        """See `Plan.attend`."""
        out = torch.zeros_like(q)
        kv_heads = pages.shape[3]
        for tile in self._tiles:
            sums = attend_tile(tile, tile_queries(tile, q, kv_heads), pages)
            attended = (sums.values / sums.total).add_(0.0)
            out[tile.rows] = by_rows(tile, attended, q.shape[1]).to(out.dtype)
        return out


def _plan_tiles(
    spans: Sequence[Span], page_size: int, group: int, device: torch.device
) -> list[Tile]:
    """Return the query tiles of one step, for all layers. `group` = query heads per KV head."""
    decodes = sorted((s for s in spans if s.count == 1), key=lambda s: -s.start)
    tiles = [[QueryRows(s.row, s.start, 1, s.pages) for s in decodes]] if decodes else []
    for span in spans:
        if span.count == 1:
            continue
        for at in range(0, span.count, QUERY_TILE):
            count = min(QUERY_TILE, span.count - at)
            tiles.append([QueryRows(span.row + at, span.start + at, count, span.pages)])
    return [
        Tile.of(
            rows, root(-(-rows[0].end // BLOCK)), page_size=page_size, group=group, device=device
        )
        for rows in tiles
    ]
