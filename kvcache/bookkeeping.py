"""The bookkeeping of one cache: who holds which page. It needs no torch, no thread and no clock.

It decides, and describes what is to be done to page contents: `sequences` describes steps and
copies of pages, which page stores execute. Time comes from the caller's clock. The control slots,
in memory that peers write, are all that it reads and writes beyond its own state.
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
        shard: Shard | None,
        identity: Identity,
        clock: Callable[[], float],
    ) -> None:
        """`pages` of `page_size` tokens, of which page 0 is the scratch page.

        `slots` are the control slots of leases; `endpoint` and `shard` go into their addresses;
        `clock` counts seconds, monotonically.
        """
        self.pages = PageManager(pages, page_size)
        self.sequences = SequenceTable(self.pages, page_size)
        self.receiver = LeaseReceiver(
            self.pages, self.sequences, slots, endpoint, shard, identity, clock
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
        """Prove that every page is free, or held as sequences, leases and `holders` say.

        Raises `Internal`.
        """
        self.pages.check([*self.sequences.holders(), *self.receiver.holders(), *holders])
