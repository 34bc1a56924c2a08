"""Paged attention on any torch device, bit-stable in float32.

The result of a query row must depend neither on the rest of the batch nor on the chunks of the
prompt. Otherwise the same request would yield different tokens under another strategy. Hence:

- Keys are reduced in blocks of `BLOCK` absolute positions, `[0, 128)`, `[128, 256)`, …. Each block
  is complete (missing keys are masked), and blocks are merged in order by the online softmax of
  FlashAttention (running maximum).
- Matrix products have a multiple of `ROW_MULTIPLE` query rows. For other counts, torch's CPU
  kernels take another code path and return other bits.

Query rows are grouped in tiles. All sequences that decode one token form one tile. A prefill chunk
is split into tiles of `QUERY_TILE` tokens of one sequence, which skips key blocks above the
causal diagonal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvcache.attention.plan import row_slots
from kvcache.pages import SCRATCH_PAGE
from kvcache.sequences import Span
from kvcache.types import PageId, TokenPos

__all__ = [
    "BLOCK",
    "ROW_MULTIPLE",
    "QueryTile",
    "StablePlan",
    "attend_tile",
    "plan_tiles",
]

BLOCK = 128  # keys
ROW_MULTIPLE = 4
QUERY_TILE = 64  # tokens


class StablePlan:
    """The bit-stable `Plan`; see the module's docstring."""

    def __init__(
        self, spans: Sequence[Span], page_size: int, group: int, device: torch.device
    ) -> None:
        places = torch.from_numpy(row_slots(spans, page_size)).to(device)
        self._page_of, self._slot_of = places[:, 0].contiguous(), places[:, 1].contiguous()
        self._tiles = plan_tiles(spans, page_size, group, device)

    def append(self, pages: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        rows = len(self._page_of)
        pages[self._page_of, 0, self._slot_of] = k[:rows]
        pages[self._page_of, 1, self._slot_of] = v[:rows]

    def attend(self, pages: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(q)
        for tile in self._tiles:
            attend_tile(tile, q, pages, out)
        return out


@dataclass(frozen=True, slots=True)
class _KeyBlock:
    sequences: int  # how many of the tile's sequences reach into this block; they come first
    pages: torch.Tensor  # [sequences * pages per block] int64
    masked: torch.Tensor | None  # [sequences, 1, rows, BLOCK] bool: keys that a row may not see
    unwritten: torch.Tensor | None  # [sequences, 1, BLOCK, 1] bool: slots that hold no key


@dataclass(frozen=True, slots=True)
class QueryTile:
    """Queries of `sequences` sequences with `count` tokens each, the longest sequence first."""

    rows: torch.Tensor  # [sequences * count] int64, indices of the step's rows
    sequences: int
    count: int
    blocks: list[_KeyBlock]


def plan_tiles(
    spans: Sequence[Span], page_size: int, group: int, device: torch.device
) -> list[QueryTile]:
    """Return the query tiles of one step, for all layers. `group` = query heads per KV head."""
    decodes = sorted((s for s in spans if s.count == 1), key=lambda s: -s.start)
    tiles = [_plan_tile(decodes, page_size, group, device)] if decodes else []
    for span in spans:
        if span.count == 1:
            continue
        for at in range(0, span.count, QUERY_TILE):
            count = min(QUERY_TILE, span.count - at)
            part = Span(span.row + at, TokenPos(span.start + at), count, span.pages)
            tiles.append(_plan_tile([part], page_size, group, device))
    return tiles


def _plan_tile(
    spans: Sequence[Span], page_size: int, group: int, device: torch.device
) -> QueryTile:
    count = spans[0].count
    rows = _padded(count * group)
    per_block = BLOCK // page_size
    blocks = []
    last = [span.start + count - 1 for span in spans]  # position of each sequence's last query
    for at in range(0, last[0] + 1, BLOCK):
        reach = sum(position >= at for position in last)
        pages: list[PageId] = []
        first = at // page_size
        for span, end in zip(spans[:reach], last, strict=False):
            owned = span.pages[first : min(first + per_block, end // page_size + 1)].tolist()
            pages += owned
            pages += [SCRATCH_PAGE] * (per_block - len(owned))
        masked = unwritten = None
        if at + BLOCK > min(span.start for span in spans[:reach]) + 1:
            keys = torch.arange(at, at + BLOCK)
            starts = torch.tensor([span.start for span in spans[:reach]])
            # Row r of a sequence is query token r // group; padding rows repeat the last token.
            token = (torch.arange(rows) // group).clamp(max=count - 1)
            queries = starts[:, None] + token
            masked = (keys > queries[:, None, :, None]).to(device)
            unwritten = (keys > starts[:, None] + count - 1)[:, None, :, None].to(device)
        page_ids = torch.tensor(pages, dtype=torch.int64, device=device)
        blocks.append(_KeyBlock(reach, page_ids, masked, unwritten))
    row_ids = [span.row + i for span in spans for i in range(count)]
    return QueryTile(torch.tensor(row_ids, device=device), len(spans), count, blocks)


def attend_tile(tile: QueryTile, q: torch.Tensor, pool: torch.Tensor, out: torch.Tensor) -> None:
    """Write the attention of one tile over one layer into the tile's rows of `out`.

    `q` and `out` are `[rows, heads, head_dim]` of the whole step; `pool` is one layer's
    `[pages, 2, page_size, kv_heads, head_dim]`. Scores and sums are in float32.
    """
    _, _, page_size, kv_heads, dim = pool.shape
    n, count = tile.sequences, tile.count
    group = q.shape[1] // kv_heads
    rows = _padded(count * group)
    grouped = q[tile.rows].view(n, count, kv_heads, group, dim).permute(0, 2, 1, 3, 4)
    queries = q.new_zeros((n, kv_heads, rows, dim), dtype=torch.float32)
    queries[:, :, : count * group] = grouped.reshape(n, kv_heads, count * group, dim) * dim**-0.5
    queries = queries.view(n * kv_heads, rows, dim)

    top = total = acc = torch.empty(0)
    for index, block in enumerate(tile.blocks):
        live = block.sequences
        heads = live * kv_heads
        kv = pool.index_select(0, block.pages).view(live, -1, 2, page_size, kv_heads, dim)
        kv = kv.permute(2, 0, 4, 1, 3, 5).reshape(2, heads, BLOCK, dim).float()
        scores = torch.bmm(queries[:heads], kv[0].transpose(1, 2))
        if block.masked is not None and block.unwritten is not None:
            scores.view(live, kv_heads, rows, BLOCK).masked_fill_(block.masked, -torch.inf)
            # A reused page may hold any value, NaN included, and 0 * NaN is not 0.
            kv[1].view(live, kv_heads, BLOCK, dim).masked_fill_(block.unwritten, 0.0)
        peak = scores.amax(-1, keepdim=True)
        if index == 0:
            top = peak
            weights = scores.sub_(top).exp_()
            total = weights.sum(-1, keepdim=True)
            acc = torch.bmm(weights, kv[1])
            continue
        # m = max(m_j), α = e^{m_j − m}: rescale the earlier sums of each row to the new maximum.
        new = torch.maximum(top[:heads], peak)
        scale = top[:heads].sub(new).exp_()
        weights = scores.sub_(new).exp_()
        total[:heads] = total[:heads] * scale + weights.sum(-1, keepdim=True)
        acc[:heads] = acc[:heads] * scale + torch.bmm(weights, kv[1])
        top[:heads] = new
    result = (acc / total).view(n, kv_heads, rows, dim)[:, :, : count * group]
    result = result.reshape(n, kv_heads, count, group, dim).permute(0, 2, 1, 3, 4)
    out[tile.rows] = result.reshape(n * count, kv_heads * group, dim).to(out.dtype)


def _padded(rows: int) -> int:
    return -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE
