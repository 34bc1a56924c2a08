"""A loan as the creditor keeps it, and what the creditor tells its debtors about loans."""

from __future__ import annotations

from dataclasses import dataclass

from kvcache.types import EngineId, LeaseId, PageId, SlotIndex

__all__ = ["Loan", "Notice", "Renewal"]


@dataclass(slots=True)
class Loan:
    """Pages of the creditor that one process of a debtor may use."""

    debtor: EngineId
    epoch: int  # of the debtor
    lease_id: LeaseId  # the debtor's name for it
    number: int  # loans are numbered in the order in which they were made
    size: int  # pages when it was made
    pages: list[PageId]  # held, one reference each; never empty
    deadline: float  # on the creditor's clock, seconds
    slot: SlotIndex  # the control slot of those who write into the pages
    nonce: int  # in that slot while `pages` are the loan's
    called_back: bool = False


@dataclass(frozen=True, slots=True)
class Notice:
    """The creditor wants a loan back: it is not renewed any more, and ends in `remaining_s`."""

    debtor: EngineId
    epoch: int
    lease_id: LeaseId
    pages: int
    remaining_s: float


@dataclass(frozen=True, slots=True)
class Renewal:
    """The answer to a renewal: what has become of each loan that was asked about."""

    renewed: tuple[LeaseId, ...]
    called_back: tuple[LeaseId, ...]  # live until their old deadline
    ended: tuple[LeaseId, ...]  # or never made
