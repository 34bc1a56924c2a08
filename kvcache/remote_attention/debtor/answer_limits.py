"""How many rows of a sequence the creditors of its blocks compute in one step."""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise

from kvcache.attention import BLOCK, nodes_of
from kvcache.remote_attention.debtor.remote_attention import RemoteAttention
from kvcache.types import EngineId, LeaseId

__all__ = ["CreditorLimits"]

FLOAT32_BYTES = 4


class CreditorLimits:
    """Keeps the answers to a chunk within half of what creditors answer; decodes take the rest.

    A creditor answers each row with a result for each node of the tree of blocks that it holds, and
    refuses a step whose answer is larger than `Limits.reply_bytes`.
    """

    def __init__(self, remote: RemoteAttention) -> None:
        self._remote = remote
        self._part_bytes = remote.shape.part_floats * FLOAT32_BYTES

    def most_rows(self, creditor: EngineId, blocks: Collection[int]) -> int | None:
        """See `kvcache.borrowing.AnswerLimits`. A creditor that is not connected sets no limit."""
        limits = self._remote.limits(creditor)
        if limits is None or not blocks:
            return None
        row_bytes = len(nodes_of(sorted(blocks))) * self._part_bytes
        return max(limits.reply_bytes // 2 // row_bytes, 1)

    def share(
        self, creditor: EngineId, blocks: Collection[int], loans: Collection[LeaseId], rows: int
    ) -> float:
        """See `kvcache.borrowing.AnswerLimits`: the largest of the shares of all limits."""
        limits = self._remote.limits(creditor)
        if limits is None or not blocks:
            return 0.0
        numbers = sorted(blocks)
        runs = sum(after - before > 1 for before, after in pairwise(numbers)) + 1
        answered = len(nodes_of(numbers)) * self._part_bytes * rows
        return max(
            1 / limits.spans,
            rows / limits.rows,
            len(numbers) * (BLOCK // self._remote.shape.page_size) / limits.pages,
            len(loans) / limits.loans,
            runs / limits.runs,
            rows * len(numbers) * BLOCK / limits.row_keys,
            answered / limits.reply_bytes,
        )
