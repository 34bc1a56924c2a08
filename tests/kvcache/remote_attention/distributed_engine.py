"""The `tiny` model over one pool; whole blocks of its sequences may lie with creditors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from creditors import CreditorProcess

from engine.models import Transformer, load_model
from kvcache.attention import BLOCK, held_planner_for, planner_for
from kvcache.memory import KVLayout
from kvcache.remote_attention import BorrowedPages, DistributedPlan, RemoteAttention
from kvcache.sequences import Span
from kvcache.types import EngineId, LeaseId, TokenPos

CPU = torch.device("cpu")
PAGE, PER_BLOCK, CONTEXT = 16, BLOCK // 16, 1024


def tiny() -> tuple[Transformer, KVLayout]:
    """Return the model, and the layout of a pool with room for 8 blocks."""
    model = load_model("tiny", dtype=torch.float32, device=CPU).transformer
    assert model is not None
    shape = model.config
    pages = 1 + CONTEXT // PAGE
    return model, KVLayout(
        shape.num_layers, pages, PAGE, shape.num_kv_heads, shape.head_dim, torch.float32
    )


class DistributedEngine:
    """An `AttentionCache` and the steps over it, with the least bookkeeping that this takes."""

    def __init__(
        self, model: Transformer, layout: KVLayout, remote: RemoteAttention | None = None
    ) -> None:
        self.model, self.layout, self.remote = model, layout, remote
        self.pool = layout.view(torch.full((layout.nbytes // 4,), torch.nan))
        self.pool[:, 0] = 0.0
        self.free = list(range(layout.pages - 1, 0, -1))
        self.tables: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}
        self.borrowed: dict[int, dict[EngineId, list[BorrowedPages]]] = {}
        self.between_layers: Callable[[int], None] = lambda layer: None
        self._planners = [
            make(layout, model.config.num_heads // layout.kv_heads, CPU)
            for make in (planner_for, held_planner_for)
        ]
        self._plan: DistributedPlan

    @torch.inference_mode()
    def step(self, chunks: Sequence[tuple[int, Sequence[int]]]) -> torch.Tensor:
        """Compute tokens of some sequences; return the logits of each chunk's last row."""
        spans, tokens, positions, last = [], [], [], []
        for sequence, own in chunks:
            start = self.lengths.setdefault(sequence, 0)
            table = self.tables.setdefault(sequence, [])
            while len(table) * PAGE < start + len(own):
                table.append(self.free.pop())
            pages = np.array(table, dtype=np.int32)
            spans.append(Span(len(tokens), TokenPos(start), len(own), pages))
            tokens += own
            positions += range(start, start + len(own))
            last.append(len(tokens) - 1)
        padding = -len(tokens) % 4
        planner, held_planner = self._planners
        self._plan = DistributedPlan(
            spans,
            {at: self.borrowed.get(sequence, {}) for at, (sequence, _) in enumerate(chunks)},
            self.remote,
            planner=planner,
            held_planner=held_planner,
            page_size=PAGE,
        )
        hidden = self.model(
            torch.tensor(tokens + [0] * padding), torch.tensor(positions + [0] * padding), self
        )
        wanted = last + [0] * (-len(last) % 4)
        logits = self.model.logits(hidden[wanted])[: len(last)]
        for sequence, own in chunks:
            self.lengths[sequence] += len(own)
        return logits

    def attention(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        self.between_layers(layer)
        self._plan.append(self.pool[layer], k, v)
        return self._plan.attend(layer, self.pool[layer], q)

    def full_blocks(self, sequence: int) -> list[int]:
        """Return the blocks that are local and full."""
        table = self.tables[sequence]
        count = self.lengths[sequence] // BLOCK
        return [block for block in range(count) if table[block * PER_BLOCK] >= 0]

    def lend_away(
        self, sequence: int, block: int, creditor: CreditorProcess, loan: str, epoch: int
    ) -> None:
        """Move a full block to a creditor; no value of it is left here."""
        numbers = range(block * PER_BLOCK, (block + 1) * PER_BLOCK)
        table = self.tables[sequence]
        own = [table[number] for number in numbers]
        theirs = creditor.lend(loan, PER_BLOCK, epoch)
        creditor.pool[:, theirs] = self.pool[:, own]
        self.pool[:, own] = torch.nan
        self.free += own
        for number in numbers:
            table[number] = -1
        self.borrowed.setdefault(sequence, {}).setdefault(creditor.name, []).append(
            BorrowedPages(
                LeaseId(loan), np.array(theirs, np.int32), np.array(list(numbers), np.int32)
            )
        )
