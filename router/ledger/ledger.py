"""The global debt ledger, and whom a debtor should ask (Infinite-LLM, section 4.4).

Coherence is loose: a row is what its instance last said. Creditors decide by their own accounts
(`kvcache/lending/`), so an old row costs a refusal and nothing else.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from engine.protocol import BadRequest, Heartbeat, NoCapacity, StaleEpoch, TooLarge, parse
from router.base import EngineId
from router.ledger.debts import Edge

__all__ = ["FRESH_S", "Candidate", "Ledger", "Row"]

CANDIDATES = 3  # of a list, as in the paper
MAX_INSTANCES = 1024
MAX_HEARTBEAT_BYTES = 64 << 10
FRESH_S = 5.0
Cost = Callable[[EngineId, EngineId], float]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A creditor to ask, by the process that was heard of last."""

    instance: EngineId
    epoch: int
    available: int  # pages, as far as the ledger knows


@dataclass(slots=True)
class Row:
    """What one process of an instance last said, in pages."""

    instance: EngineId
    epoch: int
    sequence: int
    available: int
    borrowed: dict[EngineId, int]  # by creditor
    lent: dict[EngineId, int]  # by debtor
    most: int | None  # that it would ever lend; None: it has not told
    heard: float  # when the heartbeat arrived, on the ledger's clock, seconds


class Ledger:
    """A row per instance. The age of a row counts from its arrival: no clock crosses hosts.

    A row older than `fresh_s` counts as having nothing available.
    """

    def __init__(
        self,
        cost: Cost,
        clock: Callable[[], float],
        *,
        fresh_s: float = FRESH_S,
        max_instances: int = MAX_INSTANCES,
        max_bytes: int = MAX_HEARTBEAT_BYTES,
    ) -> None:
        """`cost(debtor, creditor)` is the relative cost of communication.

        It is lower the better, `math.inf` where they cannot share memory. `clock` returns monotonic
        seconds.
        """
        self._cost = cost
        self._clock = clock
        self._fresh_s = fresh_s
        self._max_instances = max_instances
        self._max_bytes = max_bytes
        self._rows: dict[EngineId, Row] = {}

    def receive(self, body: bytes) -> bool:
        """Enter a heartbeat in JSON; return what `record` returns.

        Raises `TooLarge` for one of more than `max_bytes`, `BadRequest` for one that is malformed,
        and what `record` raises. An error changes nothing.
        """
        if len(body) > self._max_bytes:
            raise TooLarge(f"a heartbeat has at most {self._max_bytes} bytes")
        return self.record(parse(Heartbeat, body))

    def record(self, heartbeat: Heartbeat) -> bool:
        """Replace the instance's row; return False for a heartbeat not newer than the row.

        A higher epoch is a new process, of which nothing of the old row holds. Raises `StaleEpoch`
        for a lower epoch, `BadRequest` for a debt to oneself, and `NoCapacity` if there are
        `max_instances` others, all fresh. An error changes nothing.
        """
        instance = EngineId(heartbeat.instance)
        for accounts, param in ((heartbeat.borrowed, "borrowed"), (heartbeat.lent, "lent")):
            if instance in accounts:
                raise BadRequest(f"{instance} owes pages to itself", param=param)
        row = self._rows.get(instance)
        if row is not None:
            if heartbeat.epoch < row.epoch:
                raise StaleEpoch(f"{instance} has been restarted since")
            if heartbeat.epoch == row.epoch and heartbeat.sequence <= row.sequence:
                return False
        elif len(self._rows) >= self._max_instances:
            self._forget_one()
        self._rows[instance] = Row(
            instance,
            heartbeat.epoch,
            heartbeat.sequence,
            heartbeat.available,
            {EngineId(each): pages for each, pages in heartbeat.borrowed.items()},
            {EngineId(each): pages for each, pages in heartbeat.lent.items()},
            heartbeat.most,
            self._clock(),
        )
        return True

    def remove(self, instance: EngineId) -> None:
        """Forget an instance that has left the fleet, if it is known."""
        self._rows.pop(instance, None)

    def row(self, instance: EngineId) -> Row | None:
        """Return what an instance last said, None for an unknown one. It may be old."""
        return self._rows.get(instance)

    def available(self, instance: EngineId) -> int:
        """Return the pages that an instance can lend, as far as the ledger knows.

        This is what it last reported. It is 0 for an unknown instance and for a row that is too
        old.
        """
        row = self._rows.get(instance)
        return row.available if row is not None and self._fresh(row) else 0

    def creditors(self, debtor: EngineId, least: int) -> list[Candidate]:
        """Return up to three others with `least` pages or more, in the order to ask them.

        The cheapest to communicate with come first, of equals those with most available pages. A
        list is a standing one, not the answer to a request, so nothing counts as lent by it.
        """
        ranked = (
            (cost, -row.available, row.instance, row)
            for row in self._rows.values()
            if row.instance != debtor and row.available >= least and self._fresh(row)
            if (cost := self._cost(debtor, row.instance)) < math.inf
        )
        return [
            Candidate(row.instance, row.epoch, row.available)
            for *_, row in heapq.nsmallest(CANDIDATES, ranked)
        ]

    def borrowed(self, debtor: EngineId) -> int:
        """Return the pages that an instance has borrowed, by its last heartbeat."""
        row = self._rows.get(debtor)
        return sum(row.borrowed.values()) if row is not None else 0

    def blocks_for(
        self, debtor: EngineId, block: int, leaves: Mapping[EngineId, int] | None = None
    ) -> tuple[int, float]:
        """Return how many blocks of `block` pages others would lend an instance.

        `leaves` are the pages that creditors can spare, where that may be less than they say: what
        they are about to use themselves is not in their heartbeats yet. The first number is for
        now, the second one for when nothing else is lent and no page is in use; it is infinite if a
        creditor has not told what it would lend at most.
        """
        now, ever = 0, 0.0
        for row in self._rows.values():
            if row.instance != debtor and self._cost(debtor, row.instance) < math.inf:
                spared = min(row.available, (leaves or {}).get(row.instance, row.available))
                now += max(spared, 0) // block if self._fresh(row) else 0
                ever += row.most // block if row.most is not None else math.inf
        return now, ever

    def debts(self) -> dict[Edge, int]:
        """Return the debts that both sides report in fresh rows: of two numbers, the smaller.

        What only one side reports has just begun or just ended.
        """
        found: dict[Edge, int] = {}
        for row in self._rows.values():
            if not self._fresh(row):
                continue
            for creditor, pages in row.borrowed.items():
                other = self._rows.get(creditor)
                if other is not None and self._fresh(other) and row.instance in other.lent:
                    found[row.instance, creditor] = min(pages, other.lent[row.instance])
        return found

    def describe(self) -> list[dict[str, Any]]:
        """Return the rows for `GET /admin/ledger`, by instance: pages, and ages in seconds."""
        now = self._clock()
        return [
            {
                "engine": row.instance,
                "epoch": row.epoch,
                "available": self.available(row.instance),
                "lent": dict(sorted(row.lent.items())),
                "borrowed": dict(sorted(row.borrowed.items())),
                "age_s": now - row.heard,
                "fresh": self._fresh(row),
            }
            for _, row in sorted(self._rows.items())
        ]

    def _fresh(self, row: Row) -> bool:
        return self._clock() - row.heard <= self._fresh_s

    def _forget_one(self) -> None:
        """Forget the row that is oldest, to make room. Raises `NoCapacity` if it is fresh."""
        oldest = min(self._rows.values(), key=lambda row: row.heard, default=None)
        if oldest is None or self._fresh(oldest):
            raise NoCapacity(f"the ledger has {len(self._rows)} instances")
        del self._rows[oldest.instance]
