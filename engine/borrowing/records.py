"""What the accounts of an engine that borrows are made of, besides loans."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvcache.types import EngineId, LeaseId, PageId

__all__ = ["BorrowingUse", "Freeing", "Process"]


class Process(NamedTuple):
    """One process of a creditor."""

    creditor: EngineId
    epoch: int


class Freeing(NamedTuple):
    """A loan, or a part of it, that the creditor has yet to be told is over."""

    process: Process
    url: str
    loan: LeaseId
    until: float  # when the creditor ends it by itself, on the debtor's clock
    pages: tuple[PageId, ...] | None = None  # None: all


@dataclass(frozen=True, slots=True)
class BorrowingUse:
    """What an engine has borrowed now, and what has gone wrong since it started."""

    creditors: tuple[str, ...]  # that the router named last
    pages: dict[EngineId, int]  # by creditor
    loans: int
    free_blocks: int
    refusals: int  # of creditors asked for pages
    lost_loans: int
