"""A block on its way home, and an order to bring some home."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvcache.lease import Landing
from kvcache.sequences import AwayBlock, FetchCause, PagedSequence
from kvcache.types import EngineId, SeqId

__all__ = ["Fetch", "HomeOrder"]


@dataclass(slots=True, eq=False)
class HomeOrder:
    """Bring up to `blocks` blocks home from one process of a creditor."""

    creditor: EngineId
    epoch: int  # of the creditor
    blocks: int
    done: Callable[[], object]  # called once, under the cache's lock, when there is no more to do
    home: int = 0  # blocks that have come home
    under_way: int = 0
    failures: int = 0


@dataclass(slots=True, eq=False)
class Fetch:
    """Block `number` of a sequence, which its creditor puts into a landing.

    The sequence keeps the borrowed block, and attends to it, until its KV has landed.
    """

    seq_id: SeqId
    sequence: PagedSequence
    number: int
    block: AwayBlock
    cause: FetchCause
    landing: Landing
    began: float  # on the cache's clock, seconds
    order: HomeOrder | None = None
    ended_at: float | None = None  # when the creditor answered, or failed to
    failure: BaseException | None = None
