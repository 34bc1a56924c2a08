"""One tier below the device's pool: slots, a prefix tree over them, and the thread that copies.

The thread's unit of work is one page, copied without the lock. Urgent work goes first: moves of
whole runs of pages, for promotions and swaps. Prefixes that the level above may evict one day are
copied behind (*write-behind*), so that evicting them is only forgetting them.

Page contents are safe (DistServe, DS5) because a move holds its pages and slots until it has ended,
and because a page that is copied behind, which its tree alone may hold, is not freed while it is
read (`PagePool.begin_read`). A page that merely waits to be copied is held for nobody: where it is
evicted first, there is no copy.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvcache.pages.page_manager import PageManager
from kvcache.pages.prefix_tree import Tokens
from kvcache.tiers.store import DevicePages, TierStore
from kvcache.types import PageId

__all__ = ["Level", "Move", "Tier", "TierStats", "TierUse"]

log = logging.getLogger(__name__)

OFFERS = 256  # prefixes that wait to be copied; then the oldest are forgotten
EVICT = 16  # slots freed at once for write-behind: looking for them takes longer than a copy


class Level(Protocol):
    """What lies above a tier: pages, and who holds them."""

    manager: PageManager

    def read(self, page: PageId, out: torch.Tensor) -> None:
        """Copy a page into `out`; for the thread of the tier below."""
        ...


@dataclass(frozen=True, slots=True)
class TierUse:
    """Slots by owner, adding up to `total`."""

    name: str
    total: int
    free: int
    cached: int
    swapped: int
    copying: int


@dataclass(slots=True)
class TierStats:
    """Counters since the start."""

    promoted_tokens: int = 0
    swaps_out: int = 0
    swaps_in: int = 0
    bytes_in: int = 0  # written to the tier
    bytes_out: int = 0
    failures: int = 0  # pages that could not be copied
    skipped: int = 0  # prefixes that were not copied behind, for want of time or room


@dataclass(slots=True, eq=False)
class Move:
    """A copy of pages of the device to slots (`out`) or back; it holds both until it ends.

    `pages[first + i]` goes with `slots[i]`. `finish`, under the lock, takes pages and slots over:
    the first `done` are copied. What it returns is the result of `ended`.
    """

    out: bool
    pages: list[PageId]
    slots: list[PageId]
    first: int
    finish: Callable[[Move], int]
    done: int = 0
    failed: bool = False
    wanted: bool = True  # if not, it ends after the page that is being copied
    ended: Future[int] = field(default_factory=Future)


class Tier:
    """Slots for pages. The cache's lock guards all but the copies."""

    def __init__(
        self,
        store: TierStore,
        device: DevicePages,
        above: Level,
        page_size: int,
        lock: threading.RLock,
    ) -> None:
        self.name = store.name
        self.manager = PageManager(store.slots + 1, page_size)  # and slot 0, which is never used
        self.stats = TierStats()
        self._store = store
        self._device = device
        self._above = above
        self._size = page_size
        self._work = threading.Condition(lock)
        self._moves: deque[Move] = deque()
        self._offers: deque[npt.NDArray[np.int32]] = deque()
        self._offer: npt.NDArray[np.int32] | None = None  # the one that is being copied
        self._filling: list[PageId] = []  # the slot that it is copied into
        self._closed = False
        self._find()
        self._thread = threading.Thread(target=self._run, name=f"{self.name}-tier", daemon=True)
        self._thread.start()

    @property
    def kept(self) -> bool:
        """Whether what is in it outlives the process."""
        return self._store.kept

    def offer(self, tokens: Tokens) -> None:
        """Copy the full pages of `tokens` behind, those that are not here and still above then."""
        with self._work:
            if self._closed:
                return
            if len(self._offers) == OFFERS:
                self._offers.popleft()
                self.stats.skipped += 1
            self._offers.append(np.array(tokens, dtype=np.int32))
            self._work.notify()

    def move(self, move: Move) -> None:
        """Copy the pages of `move`, soon; after `close`, end it with nothing copied."""
        move.ended.set_running_or_notify_cancel()  # who waits for it may leave; the copy goes on
        with self._work:
            self._moves.append(move)
            self._work.notify()
            closed = self._closed
        if closed:
            self._end(move)

    def read(self, page: PageId, out: torch.Tensor) -> None:
        """See `Level.read`. Raises `OSError`."""
        np.copyto(out.numpy(), self._store.fetch(page).numpy())

    def close(self) -> None:
        """End the thread after the page under way; moves end with what is copied by then."""
        with self._work:
            self._closed = True
            self._offers.clear()
            self._work.notify()
        self._thread.join()
        while self._moves:
            self._end(self._moves[0])
        self._store.close()

    @property
    def quiet(self) -> bool:
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
        """Pages of the device that moves hold, for the proof of ownership."""
        return (move.pages for move in self._moves)

    def check(self, holders: Sequence[Sequence[PageId]]) -> None:
        """Prove that the tree, moves and `holders` hold the slots that are not free.

        Raises `Internal`.
        """
        self.manager.check([*holders, *(move.slots for move in self._moves), self._filling])

    def _find(self) -> None:
        """Begin with what an earlier process has left."""
        try:
            found = self._store.found()
        except OSError as error:
            log.warning("the %s tier: %s", self.name, error)
            return
        claimed = self.manager.pool.claim(slot for _, slots in found for slot in slots)
        for tokens, slots in found:
            self.manager.prefix.insert(tokens, slots)
        self.manager.drop(claimed)
        if claimed:
            log.info("the %s tier has %d pages from before", self.name, len(claimed))

    # The thread

    def _run(self) -> None:
        while (work := self._next()) is not None:
            try:
                work()
            except Exception:  # whatever it is, it must not end the thread, nor come again
                log.exception("the %s tier", self.name)
                with self._work:
                    self._offer = None

    def _next(self) -> Callable[[], None] | None:
        """The next page's worth of work; waits for it. None: closed."""
        with self._work:
            self._work.wait_for(lambda: self._closed or not self.quiet)
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
        except Exception as error:  # whatever it is, it must not end the thread
            log.exception("the %s tier", self.name)
            move.ended.set_exception(error)
        else:
            move.ended.set_result(result)  # the bookkeeping shows it by now

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
        """Copy the first page of `tokens` that is missing here, or be done with them."""
        with self._work:
            missing = self._missing(tokens)
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
            mine = self.manager.prefix.match(tokens[: depth * self._size])
            if copied and len(mine) == depth:  # else swaps took what it continues
                self.manager.prefix.insert(prefix, [*mine, slot])
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

    def _missing(self, tokens: npt.NDArray[np.int32]) -> tuple[int, PageId] | None:
        """Which page of `tokens` is missing here, and where it is above; takes a slot for it."""
        there = self._above.manager.prefix.match(tokens, use=False)
        here = self.manager.prefix.match(tokens)
        if len(here) >= len(there):
            return None
        if not self.manager.pool.free:
            self.manager.share(here)  # so that it does not evict what it continues
            self.manager.prefix.evict(EVICT)
            self.manager.drop(here)
        if not self.manager.pool.free:
            self.stats.skipped += 1
            return None
        self._filling = self.manager.take(1)
        return len(here), there[len(here)]

    def _copied(self, copy: Callable[[], None]) -> bool:
        """Whether a page could be copied: what could not is missing here, and no more than that."""
        try:
            copy()
        except OSError as error:
            log.warning("the %s tier: %s", self.name, error)
        except Exception:
            log.exception("the %s tier could not copy a page", self.name)
        else:
            return True
        self.stats.failures += 1
        return False
