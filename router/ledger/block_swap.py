"""What became of the swaps of a router."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Literal

from router.base import EngineId

__all__ = ["BlockSwap", "SwapHistory"]

KEPT = 32  # latest ones that have ended


@dataclass(eq=False, slots=True)
class BlockSwap:
    """Each engine of the cycle brings `blocks` blocks home from the next one."""

    id: str
    cycle: tuple[EngineId, ...]
    blocks: int
    began: float = field(default_factory=time.time)  # seconds since 1970
    home: dict[EngineId, int] = field(default_factory=dict)  # blocks, by those that have answered
    refused: dict[EngineId, tuple[str, str]] = field(default_factory=dict)  # type and message
    seconds: float | None = None  # that it took; None: it is under way

    @property
    def total(self) -> int:
        """Blocks that have come home."""
        return sum(self.home.values())

    @property
    def outcome(self) -> Literal["done", "partly", "nothing"]:
        """Whether all blocks have come home, some, or none."""
        if not self.total:
            return "nothing"
        return "done" if self.total == self.blocks * len(self.cycle) else "partly"

    def describe(self) -> dict[str, Any]:
        """Return it for `GET /admin/ledger`."""
        return {
            "id": self.id,
            "cycle": list(self.cycle),
            "blocks": self.blocks,
            "began": self.began,
            "seconds": self.seconds,
            "outcome": self.outcome if self.seconds is not None else None,
            "home": dict(self.home),
            "refused": {
                name: {"type": type, "message": message}
                for name, (type, message) in self.refused.items()
            },
        }


class SwapHistory:
    """The latest swaps that have ended."""

    def __init__(self) -> None:
        self._ended: deque[BlockSwap] = deque(maxlen=KEPT)

    def add(self, swap: BlockSwap) -> None:
        """Note one that has ended."""
        self._ended.appendleft(swap)

    def describe(self, running: list[BlockSwap]) -> dict[str, Any]:
        """Return those under way, and the latest ended ones, newest first."""
        return {
            "running": [swap.describe() for swap in running],
            "ended": [swap.describe() for swap in self._ended],
        }
