"""One sequence that is not on the device."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from kvcache.errors import Internal
from kvcache.pages.page_manager import PageManager
from kvcache.tiers.tier import Move, Tier
from kvcache.types import PageId

__all__ = ["Swap"]


class Swap:
    """A sequence's KV in a tier, or on its way there or back.

    DistServe, DS5 and DS6: its pages and slots are held while they are copied, and the sequence
    exists again only when all of it is back. What cannot be copied is cut off: the sequence is
    shorter then, and the rest is computed again. The cache's lock guards it.
    """

    def __init__(
        self, tier: Tier, manager: PageManager, pages: list[PageId], length: int, page_size: int
    ) -> None:
        """Begin to copy `pages`, the `length` tokens of a sequence, out; they go when that is done.

        Raises `NoCapacity`, changing nothing.
        """
        self.tier = tier
        self.length = length
        self.slots: list[PageId] = []  # while nothing moves; a move holds its own
        self._manager = manager
        self._size = page_size
        move = Move(True, pages, tier.manager.take(len(pages)), 0, self._out)
        self._move: Move | None = move
        self.out = move.ended  # with the length that is kept
        tier.move(move)

    @property
    def moving(self) -> bool:
        """Whether it is being copied."""
        return self._move is not None

    def back(self, pages: list[PageId], landed: Callable[[list[PageId], int], None]) -> Future[int]:
        """Copy it into `pages` of the device, which may be more than it needs.

        The result is its length then, as given to `landed`, which takes the pages. Raises
        `Internal` while it is being copied.
        """
        if self._move is not None:
            raise Internal("a sequence is swapped in while it is being copied")

        def finish(move: Move) -> int:
            self._move = None
            self.tier.manager.drop(move.slots)
            if not move.wanted:
                self._manager.drop(move.pages)
                return 0
            self.length = min(self.length, move.done * self._size)
            self.tier.stats.swaps_in += 1
            landed(move.pages, self.length)
            return self.length

        self._move = move = Move(False, pages, self.slots, 0, finish)
        self.slots = []
        self.tier.move(move)  # which ends it at once if the tier is closed
        return move.ended

    def abandon(self) -> None:
        """Let go of it: at once, or when the page that is being copied is."""
        if self._move is not None:
            self._move.wanted = False
        self.tier.manager.drop(self.slots)
        self.slots = []

    def _out(self, move: Move) -> int:
        self._move = None
        self._manager.drop(move.pages)
        keep = move.done if move.wanted else 0
        self.tier.manager.drop(move.slots[keep:])
        self.slots = move.slots[:keep]
        self.length = min(self.length, keep * self._size)
        self.tier.stats.swaps_out += 1
        return self.length
