"""One tier below the device's pool: slots, a prefix tree over them, and a copying thread.

The thread copies one page at a time, without holding the lock. Moves for promotions and swaps have
priority. In the remaining time the thread copies the prefixes of the tier above (*write-behind*),
so that the tier above can evict them without a copy.

Page contents stay valid during a copy (DistServe): a move holds its pages and slots until its
end, and a page read for write-behind, which may be held by its prefix tree alone, is not freed
while it is read (`PagePool.begin_read`). A page that only waits for write-behind is not held; if it
is evicted first, it is not copied.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvcache.errors import NoCapacity
from kvcache.pages import PageManager, Tokens
from kvcache.tiers.move import Move
from kvcache.tiers.statistics import TierStats, TierUse
from kvcache.tiers.store import DevicePages, TierStore
from kvcache.types import PageId

__all__ = ["Tier", "UpperTier"]

log = logging.getLogger(__name__)

MAX_OFFERS = 256  # prefixes that wait for write-behind; beyond it the oldest are dropped


class UpperTier(Protocol):
    """The tier above another one, or the device: its pages and their bookkeeping."""

    manager: PageManager

    def read(self, page: PageId, out: torch.Tensor) -> None:
        """Copy a page into `out`; called by the thread of the tier below."""
        ...


class Tier:
    """Slots for pages. The cache's lock guards everything except the copies."""

    def __init__(
        self,
        store: TierStore,
        device: DevicePages,
        above: UpperTier,
        page_size: int,
        lock: threading.RLock,
    ) -> None:
        self.name = store.name
        self.manager = PageManager(store.slots + 1, page_size)  # slot 0 is never used
        self.stats = TierStats()
        self._store = store
        self._device = device
        self._above = above
        self._size = page_size
        self._work = threading.Condition(lock)
        self._moves: deque[Move] = deque()
        self._offers: deque[npt.NDArray[np.int32]] = deque()
        self._offer: npt.NDArray[np.int32] | None = None  # the prefix in write-behind
        self._filling: list[PageId] = []  # the slot that its page is copied into
        self._closed = False
        self._restore()
        self._thread = threading.Thread(target=self._run, name=f"{self.name}-tier", daemon=True)
        self._thread.start()

    @property
    def persistent(self) -> bool:
        """Whether the contents survive the process."""
        return self._store.persistent

    def offer(self, tokens: Tokens) -> None:
        """Queue the full pages of `tokens` for write-behind.

        A page is copied if, when its turn comes, this tier lacks it and the tier above still has
        it.
        """
        with self._work:
            if self._closed:
                return
            if len(self._offers) == MAX_OFFERS:
                self._offers.popleft()
                self.stats.skipped += 1
            self._offers.append(np.array(tokens, dtype=np.int32))
            self._work.notify()

    def move(self, move: Move) -> None:
        """Queue the copies of `move`; after `close`, end it without copies."""
        move.ended.set_running_or_notify_cancel()  # a waiter that gives up does not end the copy
        with self._work:
            self._moves.append(move)
            self._work.notify()
            closed = self._closed
        if closed:
            self._end(move)

    def read(self, page: PageId, out: torch.Tensor) -> None:
        """See `UpperTier.read`. Raises: `OSError`."""
        np.copyto(out.numpy(), self._store.fetch(page).numpy())

    def close(self) -> None:
        """End the thread after the current page. Moves end with the pages copied so far."""
        with self._work:
            self._closed = True
            self._offers.clear()
            self._work.notify()
        self._thread.join()
        while self._moves:
            self._end(self._moves[0])
        self._store.close()

    @property
    def idle(self) -> bool:
        """Whether there is nothing to copy."""
        return not (self._moves or self._offers or self._offer is not None)

    @property
    def use(self) -> TierUse:
        """Slots by owner."""
        pages = self.manager.pool
        moving = {slot for move in self._moves for slot in move.slots}
        copying = len(moving) + len(self._filling)
        cached = self.manager.prefix.cached
        rest = pages.total - pages.free - cached - copying
        return TierUse(self.name, pages.total, pages.free, cached, rest, copying)

    def device_holders(self) -> Iterator[Sequence[PageId]]:
        """Return the device pages that moves hold, for the integrity check."""
        return (move.pages for move in self._moves)

    def check(self, holders: Sequence[Sequence[PageId]]) -> None:
        """Check that the prefix tree, moves and `holders` hold exactly the slots in use.

        Raises: `Internal`.
        """
        self.manager.check([*holders, *(move.slots for move in self._moves), self._filling])

    def _restore(self) -> None:
        """Insert the prefixes that an earlier process left in the store."""
        try:
            prefixes = self._store.load_prefixes()
        except OSError as error:
            log.warning("the %s tier cannot read its store: %s", self.name, error)
            return
        claimed = self.manager.pool.claim(slot for _, slots in prefixes for slot in slots)
        for tokens, slots in prefixes:
            self.manager.prefix.insert(tokens, slots)
        self.manager.drop(claimed)
        if claimed:
            log.info("the %s tier restored %d pages", self.name, len(claimed))

    # The thread

    def _run(self) -> None:
        while (work := self._next()) is not None:
            try:
                work()
            except Exception:  # an unexpected error must neither end the thread nor repeat
                log.exception("the %s tier failed to copy", self.name)
                with self._work:
                    self._offer = None

    def _next(self) -> Callable[[], None] | None:
        """Wait for the next page to copy; return None after `close`."""
        with self._work:
            self._work.wait_for(lambda: self._closed or not self.idle)
            if self._closed:
                return None
            if self._moves:
                return partial(self._advance, self._moves[0])
            if self._offer is None:
                self._offer = self._offers.popleft()
            return partial(self._copy_behind, self._offer)

    def _advance(self, move: Move) -> None:
        if move.wanted and move.done < len(move.slots):
            page, slot = move.pages[move.first + move.done], move.slots[move.done]
            copy = self._copy_out if move.out else self._copy_in
            move.failed = not self._copied(partial(copy, page, slot))
            move.done += not move.failed
        if move.failed or not move.wanted or move.done == len(move.slots):
            self._end(move)

    def _end(self, move: Move) -> None:
        try:
            with self._work:
                self._moves.remove(move)
                result = move.finish(move)
        except Exception as error:  # an unexpected error must not end the thread
            log.exception("the %s tier failed to finish a move", self.name)
            move.ended.set_exception(error)
        else:
            move.ended.set_result(result)  # after `finish` has updated the bookkeeping

    def _copy_out(self, page: PageId, slot: PageId) -> None:
        data = self._store.buffer(slot)
        self._device.read(page, data)
        self._store.flush(slot)
        self.stats.bytes_in += data.nbytes

    def _copy_in(self, page: PageId, slot: PageId) -> None:
        data = self._store.fetch(slot)
        self._device.write(page, data)
        self.stats.bytes_out += data.nbytes

    def _copy_behind(self, tokens: npt.NDArray[np.int32]) -> None:
        """Copy the first page of `tokens` that this tier lacks; without one, end the offer."""
        with self._work:
            missing = self._take_missing(tokens)
            if missing is None:
                self._offer = None
                if self.manager.lower_tier is not None:
                    self.manager.lower_tier.offer(tokens)
                return
            depth, page = missing
            (slot,) = self._filling
            read = threading.Event()
            self._above.manager.pool.begin_read(page, read.wait)
        prefix = tokens[: (depth + 1) * self._size]
        copied = self._copied(partial(self._copy_from_above, page, slot, prefix, read))
        with self._work:
            self._above.manager.pool.end_read(page)
            before = self.manager.prefix.match(tokens[: depth * self._size])
            if copied and len(before) == depth:  # else swaps have evicted the pages before it
                self.manager.prefix.insert(prefix, [*before, slot])
            self._filling.clear()
            self.manager.drop([slot])
            if not copied:
                self._offer = None

    def _copy_from_above(
        self, page: PageId, slot: PageId, prefix: npt.NDArray[np.int32], read: threading.Event
    ) -> None:
        try:
            data = self._store.buffer(slot)
            self._above.read(page, data)
        finally:
            read.set()
        self._store.flush(slot, prefix)
        self.stats.bytes_in += data.nbytes

    def _take_missing(self, tokens: npt.NDArray[np.int32]) -> tuple[int, PageId] | None:
        """Take a slot for the first page of `tokens` that this tier lacks.

        Return the page's index and its id in the tier above, or None.
        """
        there = self._above.manager.prefix.match(tokens, use=False)
        here = self.manager.prefix.match(tokens)
        if len(here) >= len(there):
            return None
        # Branches are evicted from their ends, so holding the last page keeps the ones before it.
        last = self.manager.share(here[-1:])
        try:
            self._filling = self.manager.take(1)
        except NoCapacity:
            self.stats.skipped += 1
            return None
        finally:
            self.manager.drop(last)
        return len(here), there[len(here)]

    def _copied(self, copy: Callable[[], None]) -> bool:
        """Run `copy` and return whether it succeeded. A failure loses this one page only."""
        try:
            copy()
        except OSError as error:
            log.warning("the %s tier failed to copy a page: %s", self.name, error)
        except Exception:
            log.exception("the %s tier could not copy a page", self.name)
        else:
            return True
        self.stats.failures += 1
        return False
