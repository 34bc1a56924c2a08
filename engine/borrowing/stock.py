"""The blocks of the loans that an engine has: which are free, and which hold KV."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from kvcache.lending import BorrowedBlock
from kvcache.types import EngineId, LeaseId, PageId

__all__ = ["LoanBlocks", "Stock"]


@dataclass(slots=True)
class LoanBlocks:
    """A loan as blocks of equal size. It is given back as a whole, unless it is `closing`.

    When a part of a loan is freed, its address ends, and with it writes into the other blocks.
    """

    creditor: EngineId
    epoch: int  # of the creditor
    loan: LeaseId
    url: str  # of the creditor
    address: str
    blocks: list[tuple[PageId, ...]]  # one that has been given back has no pages
    free: list[int]  # numbers of blocks; the last one is taken next
    taken: set[int] = field(default_factory=set)
    called_back: bool = False
    closing: bool = False  # its free blocks are not offered any more, but given back


class Stock:
    """The blocks of all loans, the earliest loan first. Not thread-safe."""

    def __init__(self) -> None:
        self._loans: dict[LeaseId, LoanBlocks] = {}

    def __iter__(self) -> Iterator[LoanBlocks]:
        return iter(list(self._loans.values()))

    def __len__(self) -> int:
        """The number of loans."""
        return len(self._loans)

    def get(self, loan: LeaseId) -> LoanBlocks | None:
        """Return a loan, or None."""
        return self._loans.get(loan)

    def add(
        self,
        creditor: EngineId,
        epoch: int,
        loan: LeaseId,
        url: str,
        address: str,
        pages: list[PageId],
        block_pages: int,
    ) -> None:
        """Add a loan, whose pages are whole blocks."""
        blocks = [tuple(pages[at : at + block_pages]) for at in range(0, len(pages), block_pages)]
        free = list(reversed(range(len(blocks))))
        self._loans[loan] = LoanBlocks(creditor, epoch, loan, url, address, blocks, free)

    def remove(self, loan: LeaseId) -> LoanBlocks | None:
        """Forget a loan; return it if it was there."""
        return self._loans.pop(loan, None)

    def free(self, askable: Collection[EngineId] | None = None) -> int:
        """Return the number of free blocks: of `askable` creditors; by default of all."""
        return sum(len(loan.free) for loan in self._offered(askable))

    def take(self, askable: Collection[EngineId]) -> BorrowedBlock | None:
        """Take a free block of an askable creditor; return None if there is none.

        Loans with other taken blocks come first, so that whole loans become free.
        """
        offered = [loan for loan in self._offered(askable) if loan.free]
        if not offered:
            return None
        loan = next((each for each in offered if each.taken), offered[0])
        number = loan.free.pop()
        loan.taken.add(number)
        pages = loan.blocks[number]
        return BorrowedBlock(
            loan.creditor, loan.epoch, loan.loan, loan.address, number * len(pages), pages
        )

    def give_back(self, block: BorrowedBlock) -> LoanBlocks | None:
        """Make a block free again; return its loan, or None if it is over or has it free."""
        loan = self._loans.get(block.loan)
        if loan is None or not block.pages:
            return None
        number = block.first // len(block.pages)
        if number not in loan.taken or loan.blocks[number] != block.pages:
            return None
        loan.taken.discard(number)
        loan.free.append(number)
        return loan

    def take_free(self, loan: LoanBlocks) -> tuple[PageId, ...]:
        """Take the free blocks out of a loan, for good; return their pages."""
        pages = tuple(page for number in loan.free for page in loan.blocks[number])
        for number in loan.free:
            loan.blocks[number] = ()
        loan.free.clear()
        return pages

    def surplus(self, count: int) -> list[LoanBlocks]:
        """Return loans without a taken block, of at most `count` blocks, the latest first."""
        found = []
        for loan in reversed(list(self._loans.values())):
            if not loan.closing and not loan.taken and len(loan.free) <= count:
                found.append(loan)
                count -= len(loan.free)
        return found

    def _offered(self, askable: Collection[EngineId] | None) -> Iterator[LoanBlocks]:
        for loan in self._loans.values():
            if not loan.closing and (askable is None or loan.creditor in askable):
                yield loan
