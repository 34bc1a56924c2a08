"""`Swap`: one sequence whose KV is in a tier instead of on the device."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from kvcache.errors import Internal
from kvcache.pages import PageManager
from kvcache.tiers.move import Move
from kvcache.tiers.tier import Tier
from kvcache.types import PageId

__all__ = ["Swap"]


class Swap:
    """A sequence's KV in a tier, or being copied there or back. Guarded by the cache's lock.

    Pages and slots are held while they are copied, and the sequence exists again only when all of
    it is back (DistServe). If a page cannot be copied, its KV and all that follows it
    are dropped: the sequence becomes shorter, and the rest is computed again.
    """

    def __init__(
        self, tier: Tier, manager: PageManager, pages: list[PageId], length: int, page_size: int
    ) -> None:
        """Start to copy `pages`, the `length` tokens of a sequence, to the tier.

        The references to the pages are dropped at the end of the copy.

        Raises: `NoCapacity` if the tier has no room; nothing has changed then.
        """
        self.tier = tier
        self.length = length
        self.slots: list[PageId] = []  # empty during a move, which holds the slots itself
        self._manager = manager
        self._size = page_size
        move = Move(True, pages, tier.manager.take(len(pages)), 0, self._end_copy_out)
        self._move: Move | None = move
        self.out = move.ended  # its result is the length that was copied, in tokens
        tier.move(move)

    @property
    def moving(self) -> bool:
        """Whether a copy is in progress."""
        return self._move is not None

    def copy_in(
        self, pages: list[PageId], on_end: Callable[[list[PageId], int], None]
    ) -> Future[int]:
        """Copy the sequence into `pages` of the device, which may be more than it needs.

        At the end `on_end` takes over the pages and the length in tokens, which is also the
        future's result.

        Raises: `Internal` while another copy is in progress.
        """
        if self._move is not None:
            raise Internal("a sequence cannot be swapped in while it is being copied")

        def finish(move: Move) -> int:
            self._move = None
            self.tier.manager.drop(move.slots)
            if not move.wanted:
                self._manager.drop(move.pages)
                return 0
            self.length = min(self.length, move.done * self._size)
            self.tier.stats.swaps_in += 1
            on_end(move.pages, self.length)
            return self.length

        self._move = move = Move(False, pages, self.slots, 0, finish)
        self.slots = []
        self.tier.move(move)  # ends the move at once if the tier is closed
        return move.ended

    def abandon(self) -> None:
        """Release the slots, at once or after the page that is being copied."""
        if self._move is not None:
            self._move.wanted = False
        self.tier.manager.drop(self.slots)
        self.slots = []

    def _end_copy_out(self, move: Move) -> int:
        self._move = None
        self._manager.drop(move.pages)
        keep = move.done if move.wanted else 0
        self.tier.manager.drop(move.slots[keep:])
        self.slots = move.slots[:keep]
        self.length = min(self.length, keep * self._size)
        self.tier.stats.swaps_out += 1
        return self.length
