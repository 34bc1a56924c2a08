"""Paged attention on any torch device, bit-stable in float32.

A query row's result must not depend on what else is in the batch, nor on how the prompt was cut
into chunks, or the same request would give other tokens under another strategy. Hence:

- keys are reduced in blocks of `BLOCK` absolute positions, `[0, 128)`, `[128, 256)`, …, each whole
  (missing keys are masked), merged in order by the running-maximum rule of FlashAttention;
- matrix products have a multiple of `ROW_MULTIPLE` query rows: with other counts the CPU kernels of
  torch take another path with other bits.

Rows are grouped in tiles: all sequences that decode one token make one tile, a prefill chunk is
cut into tiles of `TILE` tokens of one sequence, so that blocks above the diagonal are skipped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from kvcache.memory.layout import KVLayout
from kvcache.pages.page_pool import SCRATCH_PAGE
from kvcache.types import PageId

__all__ = [
    "BLOCK",
    "ROW_MULTIPLE",
    "Plan",
    "Planner",
    "Span",
    "StablePlan",
    "Tile",
    "attend",
    "plan_tiles",
    "planner_for",
]

log = logging.getLogger(__name__)

BLOCK = 128  # keys
ROW_MULTIPLE = 4
TILE = 64  # query tokens


@dataclass(frozen=True, slots=True)
class Span:
    """The tokens of one sequence in a step: rows `[row, row + count)`, positions from `start`."""

    row: int
    start: int
    count: int
    pages: Sequence[PageId]  # from position 0


class Plan(Protocol):
    """What one step does in each layer: planned once, as the spans alone say it."""

    def append(self, pages: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write the rows' keys and values, `[rows, kv_heads, head_dim]`, into one layer's `pages`,
        `[pages, 2, page_size, kv_heads, head_dim]`. Rows past the spans' are padding."""
        ...

    def attend(self, pages: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        """Attention of the rows over one layer's `pages`; `q` and the result are
        `[rows, heads, head_dim]`, and numbers in all rows."""
        ...


Planner = Callable[[Sequence[Span]], Plan]  # the spans' rows come in order, from 0


def planner_for(layout: KVLayout, group: int, device: torch.device) -> Planner:
    """The fastest there is for a pool on `device`; `group` = query heads per KV head.

    In float32, the one whose results have the same bits in any batch.
    """
    if layout.dtype != torch.float32 and device.type == "cuda":
        try:
            from kvcache.attention.flashinfer import FlashInfer, supports

            if supports(layout):
                return FlashInfer(layout, group, device).plan
            what = f"heads of {layout.head_dim} in {layout.dtype}"
            log.warning("attention is slow here: FlashInfer has no kernels for %s", what)
        except (ImportError, RuntimeError) as error:  # or it does not like what else is installed
            log.warning("attention is slow here: %s (pip install 'microserve[cuda]')", error)
    if layout.dtype == torch.bfloat16 and device.type == "cpu":
        try:
            from kvcache.attention.cpu_bf16 import Bf16Plan, compiled
        except (ImportError, RuntimeError) as error:  # or it has nowhere to keep what it compiles
            log.warning("attention in bfloat16 is slow here: %s", error)
        else:
            heads, dim, page_size = layout.held.heads, layout.head_dim, layout.page_size
            compiled(heads, group, dim, page_size)
            return partial(Bf16Plan, kv_heads=heads, group=group, dim=dim, page_size=page_size)
    return partial(StablePlan, page_size=layout.page_size, group=group, device=device)


class StablePlan:
    """See `Plan`, and this module's docstring."""

    def __init__(
        self, spans: Sequence[Span], page_size: int, group: int, device: torch.device
    ) -> None:
        page_of: list[int] = []
        slot_of: list[int] = []
        for span in spans:
            for position in range(span.start, span.start + span.count):
                page_of.append(span.pages[position // page_size])
                slot_of.append(position % page_size)
        self._page_of = torch.tensor(page_of, device=device)
        self._slot_of = torch.tensor(slot_of, device=device)
        self._tiles = plan_tiles(spans, page_size, group, device)

    def append(self, pages: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        rows = len(self._page_of)
        pages[self._page_of, 0, self._slot_of] = k[:rows]
        pages[self._page_of, 1, self._slot_of] = v[:rows]

    def attend(self, pages: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(q)
        for tile in self._tiles:
            attend(tile, q, pages, out)
        return out


@dataclass(frozen=True, slots=True)
class _Block:
    sequences: int  # the first so many of the tile reach into this block
    pages: torch.Tensor  # [sequences * pages per block] int64
    hidden: torch.Tensor | None  # [sequences, 1, rows, BLOCK] bool: keys that a row may not see
    beyond: torch.Tensor | None  # [sequences, 1, BLOCK, 1] bool: slots that hold no key


@dataclass(frozen=True, slots=True)
class Tile:
    """`sequences` sequences with `count` query tokens each, the longest first."""

    rows: torch.Tensor  # [sequences * count] int64, into the step's rows
    sequences: int
    count: int
    blocks: list[_Block]


def plan_tiles(
    spans: Sequence[Span], page_size: int, group: int, device: torch.device
) -> list[Tile]:
    """The tiles of one step, planned once for all layers. `group` = query heads per KV head."""
    decodes = sorted((s for s in spans if s.count == 1), key=lambda s: -s.start)
    tiles = [_tile(decodes, page_size, group, device)] if decodes else []
    for span in spans:
        if span.count == 1:
            continue
        for at in range(0, span.count, TILE):
            count = min(TILE, span.count - at)
            part = Span(span.row + at, span.start + at, count, span.pages)
            tiles.append(_tile([part], page_size, group, device))
    return tiles


def _tile(spans: Sequence[Span], page_size: int, group: int, device: torch.device) -> Tile:
    count = spans[0].count
    rows = _padded(count * group)
    per_block = BLOCK // page_size
    blocks = []
    last = [span.start + count - 1 for span in spans]  # position of each one's last query
    for at in range(0, last[0] + 1, BLOCK):
        reach = sum(position >= at for position in last)
        pages: list[PageId] = []
        first = at // page_size
        for span, end in zip(spans[:reach], last, strict=False):
            owned = span.pages[first : min(first + per_block, end // page_size + 1)]
            pages += owned
            pages += [SCRATCH_PAGE] * (per_block - len(owned))
        hidden = beyond = None
        if at + BLOCK > min(span.start for span in spans[:reach]) + 1:
            keys = torch.arange(at, at + BLOCK)
            starts = torch.tensor([span.start for span in spans[:reach]])
            # row r of a sequence is query token r // group; padding rows see what the last one sees
            token = (torch.arange(rows) // group).clamp(max=count - 1)
            queries = starts[:, None] + token
            hidden = (keys > queries[:, None, :, None]).to(device)
            beyond = (keys > starts[:, None] + count - 1)[:, None, :, None].to(device)
        blocks.append(
            _Block(reach, torch.tensor(pages, dtype=torch.int64, device=device), hidden, beyond)
        )
    where = [span.row + i for span in spans for i in range(count)]
    return Tile(torch.tensor(where, device=device), len(spans), count, blocks)


def attend(tile: Tile, q: torch.Tensor, pool: torch.Tensor, out: torch.Tensor) -> None:
    """Attention of one tile over one layer.

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
        if block.hidden is not None and block.beyond is not None:
            scores.view(live, kv_heads, rows, BLOCK).masked_fill_(block.hidden, -torch.inf)
            # A reused page may hold anything, also NaN, and 0 * NaN is not 0.
            kv[1].view(live, kv_heads, BLOCK, dim).masked_fill_(block.beyond, 0.0)
        peak = scores.amax(-1, keepdim=True)
        if index == 0:
            top = peak
            weights = scores.sub_(top).exp_()
            total = weights.sum(-1, keepdim=True)
            acc = torch.bmm(weights, kv[1])
            continue
        # m = max(m_j), α = e^{m_j − m}: the rows' earlier sums are scaled to the new maximum.
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
