"""The graph of debts: an edge from each debtor to each of its creditors, weighted in pages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from engine.protocol import BadRequest
from router.base import EngineId

__all__ = ["Debts", "Edge", "check_debts", "net_positions", "remote_pages", "settle"]

Edge = tuple[EngineId, EngineId]  # debtor, creditor
Debts = Mapping[Edge, int]  # pages of the creditor that the debtor uses


def check_debts(debts: Debts) -> None:
    """Raise `BadRequest` for a debt below 0 pages, or one that an instance owes to itself."""
    for (debtor, creditor), pages in debts.items():
        if debtor == creditor or pages < 0:
            raise BadRequest(f"no debt: {debtor} owes {pages} pages to {creditor}", param="debts")


def remote_pages(debts: Debts) -> int:
    """Return how many pages are not on the instance that uses them (section 4.5)."""
    return sum(debts.values())


def net_positions(debts: Debts) -> dict[EngineId, int]:
    """Return the pages that each instance has lent, less those that it has borrowed."""
    net: Counter[EngineId] = Counter()
    for (debtor, creditor), pages in debts.items():
        net[debtor] -= pages
        net[creditor] += pages
    return dict(net)


def settle(debts: Debts, edges: Iterable[Edge], pages: int) -> dict[Edge, int]:
    """Return `debts` less `pages` of each of `edges`; those that are then 0 are left out.

    Raises `BadRequest` if one of them is smaller, or `pages` is below 1.
    """
    if pages < 1:
        raise BadRequest("at least one page is settled", param="pages")
    left = dict(debts)
    for debtor, creditor in edges:
        rest = left.get((debtor, creditor), 0) - pages
        if rest < 0:
            raise BadRequest(f"{debtor} does not owe {pages} pages to {creditor}", param="pages")
        left[debtor, creditor] = rest
    return {edge: rest for edge, rest in left.items() if rest}
