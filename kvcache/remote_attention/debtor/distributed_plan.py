"""The attention of a step whose keys lie in this pool and in those of creditors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from kvcache.attention import (
    HeldPlanner,
    HeldSpan,
    MergedSpan,
    MergePlan,
    PartialAttention,
    PartRows,
    Planner,
    Ranges,
    row_slots,
)
from kvcache.errors import BadRequest, KVIncomplete
from kvcache.pages import SCRATCH_PAGE
from kvcache.remote_attention.debtor.channel import Answer
from kvcache.remote_attention.debtor.remote_attention import RemoteAttention
from kvcache.remote_attention.exchange import BorrowedPages, RemoteSpan
from kvcache.sequences import Span
from kvcache.types import EngineId

__all__ = ["DistributedPlan"]


class DistributedPlan:
    """Like a `Plan`, but for `attend`, which has to know the layer; section 4.2 of Infinite-LLM.

    Sequences without borrowed pages are attended to as on one engine. In float32 the others have
    the bits of one engine too, if borrowed pages are whole aligned blocks of `BLOCK` tokens.
    """

    def __init__(
        self,
        spans: Sequence[Span],
        borrowed: Mapping[int, Mapping[EngineId, Sequence[BorrowedPages]]],
        remote: RemoteAttention,
        *,
        planner: Planner,
        held_planner: HeldPlanner,
        page_size: int,
    ) -> None:
        """Plan a step, and tell the creditors.

        `spans` are those of a `StepDescription`. `borrowed` has the borrowed pages of span `i`, by
        creditor. The entries of these pages in the span's block table are not read. All pages of
        the span's own rows are local. Raises `KVIncomplete` for a page that is neither local nor
        borrowed, and `CreditorFailed` as `RemoteAttention.begin_step`.
        """
        asked: dict[EngineId, list[RemoteSpan]] = {}
        self._split: list[tuple[Span, list[tuple[EngineId, int]]]] = []  # its spans at creditors
        held, plain, rows, row = [], [], [], 0
        for index, span in enumerate(spans):
            own = borrowed.get(index)
            if not own:
                plain.append(Span(row, span.start, span.count, span.pages))
                rows.append(np.arange(span.row, span.row + span.count))
                row += span.count
                continue
            local = np.ones(-(-(span.start + span.count) // page_size), dtype=bool)
            where = []
            for creditor, pages in own.items():
                there = RemoteSpan(span.row, span.start, span.count, tuple(pages))
                if there.numbers.max(initial=0) >= len(local):
                    raise BadRequest(f"pages of {creditor} are behind the rows of a step")
                local[there.numbers] = False
                where.append((creditor, len(asked.setdefault(creditor, []))))
                asked[creditor].append(there)
            self._split.append((span, where))
            numbers = np.flatnonzero(local).astype(np.int32)
            if (span.pages[numbers] <= SCRATCH_PAGE).any():
                raise KVIncomplete(f"no holder has some pages of the sequence in row {span.row}")
            held.append(HeldSpan(span.row, span.start, span.count, span.pages[numbers], numbers))
        if asked:
            remote.begin_step(asked)  # they plan while this engine does
        self._merge: MergePlan | None = None  # made when the creditors have told their parts
        self._slots = torch.from_numpy(row_slots(spans, page_size))
        self._remote = remote
        self._plain = planner(plain) if plain else None
        self._plain_rows = torch.from_numpy(np.concatenate(rows)) if rows else None
        self._held = held_planner(held) if held else None
        self._local: PartialAttention | None = None  # what `_held` computes in a layer

    def append(self, pages: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """See `kvcache.attention.Plan.append`."""
        slots = self._slots.to(pages.device)
        pages[slots[:, 0], 0, slots[:, 1]] = k[: len(slots)]
        pages[slots[:, 0], 1, slots[:, 1]] = v[: len(slots)]

    def attend(self, layer: int, pages: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        """Return the attention of all rows in `layer`, whose local `pages` are given.

        Shapes are those of `Plan.attend`. Raises `CreditorFailed`: the step has no result then, and
        can be computed again without these loans.
        """
        if self._held is None:
            return self._plain.attend(pages, q) if self._plain else torch.zeros_like(q)
        self._remote.send(layer, q)
        if self._local is None:
            self._local = PartialAttention.empty(self._held.rows, q.shape[1], q.shape[2], q.device)
        self._held.attend_rows(pages, q, self._local)
        out = torch.zeros_like(q)
        if self._plain is not None and self._plain_rows is not None:
            some = self._plain_rows.to(q.device)
            out[some] = self._plain.attend(pages, q[some])
        answers = self._remote.receive(layer)
        if self._merge is None:
            self._merge = self._plan_merge(self._held.part_ranges, answers)
        self._merge.write([self._local, *(answer.rows for answer in answers.values())], out)
        return out

    def _plan_merge(self, local: Ranges, answers: Mapping[EngineId, Answer]) -> MergePlan:
        """Plan the merge of the rows of local parts, and behind them those of all answers."""
        at = 0
        parts: list[list[PartRows]] = []
        for (span, _), ranges in zip(self._split, local, strict=True):
            parts.append([])
            for begin, end in ranges:
                parts[-1].append(PartRows(begin, end, at))
                at += span.count
        index = {where: i for i, (_, own) in enumerate(self._split) for where in own}
        for creditor, answer in answers.items():
            for number, (ranges, count) in enumerate(
                zip(answer.ranges, answer.counts, strict=True)
            ):
                for begin, end in ranges:
                    parts[index[creditor, number]].append(PartRows(begin, end, at))
                    at += count
        return MergePlan(
            [
                MergedSpan(span.row, span.start, span.count, own)
                for (span, _), own in zip(self._split, parts, strict=True)
            ]
        )
