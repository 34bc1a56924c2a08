"""Whether blocks are cheaper to fetch than to leave where they are (Infinite-LLM, section 4.6)."""

from __future__ import annotations

from typing import Protocol

from kvcache.types import EngineId

__all__ = ["FetchCost"]


class FetchCost(Protocol):
    """What fetching costs. `kvcache.remote_attention.MeasuredFetchCost` measures it."""

    def fetched(self, creditor: EngineId, seconds: float) -> None:
        """Count a block that has come home after so many seconds."""
        ...

    def cheaper(self, creditor: EngineId, blocks: int, rows: int, steps: int) -> bool:
        """Return whether to fetch all `blocks` blocks that a sequence has at a creditor.

        It is expected to compute `rows` further tokens, in `steps` steps.
        """
        ...
