"""How many rows of a sequence the creditors of its blocks compute in one step."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from kvcache.types import EngineId, LeaseId

__all__ = ["AnswerLimits"]


class AnswerLimits(Protocol):
    """What creditors compute. `kvcache.remote_attention.CreditorLimits` asks them."""

    def most_rows(self, creditor: EngineId, blocks: Collection[int]) -> int | None:
        """Return how many rows a creditor answers in a step over these blocks of a sequence.

        At least one; None: it sets no limit.
        """
        ...

    def share(
        self, creditor: EngineId, blocks: Collection[int], loans: Collection[LeaseId], rows: int
    ) -> float:
        """Return which share of what a creditor answers in a step these rows of a sequence take.

        Rows whose shares are 1 at most in all are answered; 0: it sets no limit.
        """
        ...
