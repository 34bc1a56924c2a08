"""How many rows of a sequence the creditors of its blocks compute in one step."""

from __future__ import annotations

from kvcache.attention import nodes_of
from kvcache.remote_attention import RemoteAttention
from kvcache.sequences import AwayBlock
from kvcache.types import EngineId

__all__ = ["AnswerLimits"]

FLOAT32_BYTES = 4


class AnswerLimits:
    """Keeps the answers to a chunk within half of what creditors answer; decodes take the rest.

    A creditor answers each row with a result for each node of the tree of blocks that it holds, and
    refuses a step whose answer is larger than `Limits.reply_bytes`.
    """

    def __init__(self, remote: RemoteAttention) -> None:
        self._remote = remote
        self._part_bytes = remote.shape.part_floats * FLOAT32_BYTES

    def most_rows(self, away: tuple[tuple[int, AwayBlock], ...]) -> int | None:
        """Return how many rows of a sequence with these blocks elsewhere fit an answer.

        At least one; None: the blocks set no limit.
        """
        held: dict[EngineId, list[int]] = {}
        for number, block in away:
            held.setdefault(block.creditor, []).append(number)
        found = None
        for creditor, numbers in held.items():
            if (limits := self._remote.limits(creditor)) is not None:
                row_bytes = len(nodes_of(numbers)) * self._part_bytes
                rows = max(limits.reply_bytes // 2 // row_bytes, 1)
                found = rows if found is None else min(found, rows)
        return found
