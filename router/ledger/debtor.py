"""An engine that borrows, as the ledger speaks to it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from engine.protocol import BLOCK_TOKENS, LendCreditors, LendHome, LendHomeReply
from router.base import EngineId

__all__ = ["Debtor", "block_pages"]


def block_pages(page_size: int) -> int:
    """Return the pages of a block, with so many tokens each."""
    return max(BLOCK_TOKENS // max(page_size, 1), 1)


@dataclass(frozen=True, slots=True)
class Debtor:
    """A process of an engine that borrows."""

    instance: EngineId
    epoch: int
    page_size: int  # tokens
    set_creditors: Callable[[LendCreditors], Awaitable[object]]
    bring_home: Callable[[LendHome], Awaitable[LendHomeReply]]

    @property
    def block_pages(self) -> int:
        """Pages of a block."""
        return block_pages(self.page_size)
