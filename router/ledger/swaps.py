"""DGFM: cycles of debts are swapped away, so that pages come home (Infinite-LLM, section 4.5).

Where each instance of a cycle owes to the next one, every host can send the same number of pages
home to their owner, and every owner has room for them in what it sends away itself. No instance
needs a free page for that (`router/ledger/rebalancing.py` gives the orders). The search of the
paper's algorithm 1 is one for undirected graphs and finds a cycle in the acyclic debts of Figure 4.
This one is a depth-first search in three colours.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.protocol import BadRequest
from router.base import EngineId
from router.ledger.debts import Debts, Edge, check_debts

__all__ = ["Swap", "plan_swaps"]


@dataclass(frozen=True, slots=True)
class Swap:
    """A cycle of debts that fall by `amount` each: together they fall by `amount * len(cycle)`.

    Each instance owes to the next one, and the last one to the first.
    """

    cycle: tuple[EngineId, ...]
    amount: int  # pages, or blocks, as in the debts

    @property
    def edges(self) -> list[Edge]:
        """The debts of the cycle, as (debtor, creditor)."""
        return list(zip(self.cycle, (*self.cycle[1:], self.cycle[0]), strict=True))


def plan_swaps(debts: Debts, least: int) -> list[Swap]:
    """Return swaps after which no cycle of debts >= `least` is left.

    `least` is the paper's threshold, in the unit of the debts, pages or blocks: no swap moves
    fewer. Each swap takes the smallest debt of its cycle, as it is after the swaps before. Free
    pages and net position of every instance stay as they are. The order of the instances' ids
    decides which cycles are found first. Takes O(instances * debts) steps. Raises `BadRequest` if
    `least` is below 1, for a debt below 0, and for one to oneself.
    """
    if least < 1:
        raise BadRequest("a swap moves at least one page", param="least")
    check_debts(debts)
    return _Search(debts, least).run()


class _Search:
    """A depth-first search that cancels the cycles that it meets.

    An instance is white (not met), grey (on the path) or black (in no cycle of what is left). Debts
    only shrink, so a black one stays black.
    """

    def __init__(self, debts: Debts, least: int) -> None:
        self._left = dict(debts)
        self._least = least
        # Creditors that have yet to be looked at, the next one last.
        self._todo: dict[EngineId, list[EngineId]] = {}
        for debtor, creditor in sorted(debts, reverse=True):
            self._todo.setdefault(debtor, []).append(creditor)
        self._path: list[EngineId] = []
        self._grey: dict[EngineId, int] = {}  # place in the path
        self._black: set[EngineId] = set()
        self._swaps: list[Swap] = []

    def run(self) -> list[Swap]:
        for start in sorted(self._todo):
            if start not in self._black:
                self._from(start)
        return self._swaps

    def _from(self, start: EngineId) -> None:
        """Search from a white instance until the path is empty."""
        self._enter(start)
        while self._path:
            here = self._path[-1]
            todo = self._todo.get(here)
            if not todo:
                self._path.pop()
                del self._grey[here]
                self._black.add(here)
            elif self._left[here, todo[-1]] < self._least or todo[-1] in self._black:
                todo.pop()
            elif todo[-1] in self._grey:
                self._cancel(self._grey[todo[-1]])
            else:
                self._enter(todo[-1])

    def _enter(self, instance: EngineId) -> None:
        self._grey[instance] = len(self._path)
        self._path.append(instance)

    def _cancel(self, first: int) -> None:
        """Cancel the cycle from place `first` of the path; cut the path where a debt is now small.

        What lies behind the cut is white again: it may be in cycles that other paths lead to.
        """
        cycle = self._path[first:]
        edges = Swap(tuple(cycle), 1).edges
        pages = min(self._left[edge] for edge in edges)
        for edge in edges:
            self._left[edge] -= pages
        self._swaps.append(Swap(tuple(cycle), pages))
        for place, edge in enumerate(edges[:-1], start=first + 1):
            if self._left[edge] < self._least:
                for instance in self._path[place:]:
                    del self._grey[instance]
                del self._path[place:]
                break
