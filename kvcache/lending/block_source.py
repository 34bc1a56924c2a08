"""Where a debtor gets blocks of borrowed pages from: the seam between accounts and sequences.

The side that keeps sequences takes blocks and puts KV into them. The side that keeps the accounts
borrows them from creditors, renews the loans, and tells when a loan has to end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from kvcache.types import EngineId, LeaseId, PageId

__all__ = ["BlockSource", "BorrowedBlock"]


class BorrowedBlock(NamedTuple):
    """Pages of a loan with room for one aligned block of tokens (an rBlock, section 4.3)."""

    creditor: EngineId
    epoch: int  # of the creditor
    loan: LeaseId
    address: str  # the loan's signed address
    first: int  # position of the block's first page among those of the loan
    pages: tuple[PageId, ...]  # in the creditor's pool


class BlockSource(Protocol):
    """Borrowed blocks without KV. Thread-safe; no call waits for a creditor."""

    # Called on any thread: a wanted block has come.
    on_ready: Callable[[], object]
    # Called on any thread: these loans of a creditor are over, and their KV with them.
    on_lost: Callable[[EngineId, Sequence[LeaseId]], object]
    # Called on any thread: these loans are called back. Blocks in them should be given back soon;
    # the loans are over at their old deadline, and `on_lost` follows then.
    on_called_back: Callable[[EngineId, Sequence[LeaseId]], object]

    def want(self, blocks: int) -> None:
        """Say how many free blocks are needed soon, in all. `on_ready` follows if any come.

        This replaces what was wanted before. Each `take` makes it one less.
        """
        ...

    def take(self) -> BorrowedBlock | None:
        """Return a free block of a creditor that can be asked, or None if there is none now."""
        ...

    def give_back(self, block: BorrowedBlock, *, at_once: bool = False) -> None:
        """Return a block. Nothing is written into it any more, and nobody attends to it.

        With `at_once`, its creditor gets these pages back now. No free block of the same loan is
        offered any more then, because the address of the loan ends.
        """
        ...

    def send_home(
        self,
        block: BorrowedBlock,
        kv_addr: str,
        done: Callable[[BaseException | None], object],
    ) -> None:
        """Have the creditor put the KV of a taken block at `kv_addr`, from position 0 on.

        `done` is called once, on any thread and in bounded time, with the failure if there is one.
        After a failure the creditor may still be writing.
        """
        ...

    def failed(self, creditor: EngineId) -> None:
        """Say that a step with this creditor failed. `take` offers none of its blocks for now.

        A creditor whose exchange is lost has lost all its loans: `on_lost` follows within a second.
        Another one is asked at once which of its loans have ended; `on_lost` follows for these.
        """
        ...
