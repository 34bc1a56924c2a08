"""The bookkeeping of one cache: who holds which page. It uses no torch, no thread and no clock.

Bookkeeping decides; page stores execute. `sequences` describes steps and page copies as plain data,
and a page store applies them to page contents. The caller passes a clock. Beyond its own state,
bookkeeping reads and writes only the control slots, which lie in memory that peers write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvcache.lease.control_slots import ControlSlots
from kvcache.lease.identity import Identity
from kvcache.lease.receiver import LeaseReceiver
from kvcache.pages.page_manager import PageManager
from kvcache.sequences.table import SequenceTable
from kvcache.shard import Shard
from kvcache.types import PageId

__all__ = ["Bookkeeping", "PageUse"]


@dataclass(frozen=True, slots=True)
class PageUse:
    """Pages by owner, adding up to `total`; `pinned` ones are cached or active as well."""

    total: int
    free: int
    cached: int
    leased: int
    active: int
    quarantined: int
    pinned: int


class Bookkeeping:
    """Pages, sequences and receive leases. Not thread-safe: `KVCache` guards it by its lock."""

    def __init__(
        self,
        pages: int,
        page_size: int,
        *,
        slots: ControlSlots,
        endpoint: Callable[[], str],
        shards: tuple[Shard, ...] = (),
        identity: Identity,
        clock: Callable[[], float],
    ) -> None:
        """Manage `pages` pages of `page_size` tokens each; page 0 is the scratch page.

        `slots` are the control slots of leases. `endpoint` and `shards` go into the addresses of
        leases. `clock` returns monotonic seconds.
        """
        self.pages = PageManager(pages, page_size)
        self.sequences = SequenceTable(self.pages, page_size)
        self.receiver = LeaseReceiver(
            self.pages, self.sequences, slots, endpoint, shards, identity, clock
        )

    @property
    def page_use(self) -> PageUse:
        """Pages by owner."""
        pages, leases = self.pages, self.receiver.leases
        free, cached = pages.pool.free, pages.prefix.cached
        leased, quarantined = leases.leased, leases.quarantined
        active = pages.total - free - cached - leased - quarantined
        return PageUse(pages.total, free, cached, leased, active, quarantined, pages.policy.pinned)

    def check(self, holders: Iterable[Sequence[PageId]] = ()) -> None:
        """Check that every page is free, or held as sequences, leases and `holders` say.

        Raises `Internal` if one is not.
        """
        self.pages.check([*self.sequences.holders(), *self.receiver.holders(), *holders])
