"""Leases whose KV has landed, between their end and the request of vLLM's that goes on from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from engine.vllm.core.pool import VllmPages
from kvcache.errors import Internal
from kvcache.types import PageId, SeqId

__all__ = ["Start", "Starts"]


@dataclass(slots=True)
class Start:
    """The KV of the first `length` tokens of a request that vLLM has not scheduled yet.

    Full blocks are in the prefix cache, where vLLM finds them. The rest of `length` is in `tail`,
    a block that the request gets a copy of.
    """

    pages: list[PageId]
    length: int

    def tail(self, page_size: int) -> PageId | None:
        """Return the block with the last tokens; None if they fill whole blocks."""
        full, rest = divmod(self.length, page_size)
        return self.pages[full] if rest else None


class Starts:
    """The starts by number. Implements `kvcache.lease.LeaseSequences`."""

    def __init__(
        self, pages: VllmPages, page_size: int, copy: Callable[[PageId, PageId], None]
    ) -> None:
        """`copy(source, target)` copies a block at once."""
        self.page_size = page_size
        self.growing = 0  # requests of vLLM's that run
        self._pages = pages
        self._copy = copy
        self._all: dict[SeqId, Start] = {}

    def __len__(self) -> int:
        return len(self._all) + self.growing

    def __getitem__(self, number: SeqId) -> Start | None:
        return self._all.get(number)

    def check_new(self, seq_id: SeqId) -> None:
        """Raise `Internal` if the number is in use."""
        if seq_id in self._all:
            raise Internal(f"start {seq_id} exists")

    def put(self, seq_id: SeqId, pages: list[PageId], length: int) -> None:
        """Add a start that owns the references to `pages`; those beyond `length` are dropped."""
        wanted = -(-length // self.page_size)
        self._pages.drop(pages[wanted:])
        self._all[seq_id] = Start(pages[:wanted], length)

    def copy_page(self, source: PageId, target: PageId, rows: int) -> None:
        """Copy a block; `rows` of it count."""
        self._copy(source, target)

    def end(self, number: SeqId) -> None:
        """Drop a start's blocks. Idempotent."""
        start = self._all.pop(number, None)
        if start is not None:
            self._pages.drop(start.pages)

    def holders(self) -> Iterator[Sequence[PageId]]:
        """Yield the blocks that starts hold, to prove ownership."""
        for start in self._all.values():
            yield start.pages
