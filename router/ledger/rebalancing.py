"""Swaps cycles of debts away, by orders to their debtors (Infinite-LLM, section 4.5).

The ledger may be old. An order that no longer holds is refused by the engine, or brings fewer
blocks home; nothing else depends on it.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Iterable, Mapping

from engine.protocol import LendHome, MicroserveError
from router.base import EngineId
from router.ledger.block_swap import BlockSwap, SwapHistory
from router.ledger.debtor import Debtor
from router.ledger.debts import Edge
from router.ledger.ledger import Ledger
from router.ledger.swaps import Swap, plan_swaps

__all__ = ["Rebalancing"]

log = logging.getLogger(__name__)

FREEZE_S = 5.0  # for the blocks of a swap to come home
ANSWER_S = 2.0  # for the answer after that
LOOK_S = 0.2  # between two searches for cycles
FIRST_REST_S, LONGEST_REST_S = 5.0, 80.0  # of a cycle after a swap


class Rebalancing:
    """Looks for cycles of debts when heartbeats have come, and has their debtors bring blocks home.

    An engine takes part in one swap at a time, and in the next one only once it has been heard of
    again. A cycle rests after its swap: five seconds, and twice as long each time that no block
    came home.
    """

    def __init__(
        self,
        ledger: Ledger,
        debtors: Callable[[], Iterable[Debtor]],
        tasks: asyncio.TaskGroup,
        *,
        least: int,
        ended: Callable[[BlockSwap], object] = lambda _: None,
        begun: Callable[[BlockSwap], object] = lambda _: None,
    ) -> None:
        """`debtors` returns the engines that borrow now.

        `least` is the paper's threshold, in blocks: a cycle with a smaller debt is left alone. 0:
        no cycle is swapped. `begun` and `ended` are told of each swap.
        """
        self._ledger, self._debtors, self._tasks = ledger, debtors, tasks
        self._least, self._begun, self._ended = least, begun, ended
        self._clock = asyncio.get_running_loop().time
        self._history = SwapHistory()
        self._running: dict[BlockSwap, asyncio.Task[None]] = {}
        self._swapped: dict[EngineId, float] = {}  # when the last swap of an engine ended
        self._rests: dict[tuple[EngineId, ...], tuple[float, float]] = {}  # until when, how long
        self._next_look = 0.0
        self._closed = False

    def look(self) -> None:
        """Begin the swaps that the ledger calls for. Call it when the ledger has changed."""
        now = self._clock()
        if not self._least or self._closed or now < self._next_look:
            return
        self._next_look = now + LOOK_S
        debts = self._ledger.debts()
        if not debts:
            return
        debtors = {each.instance: each for each in self._debtors()}
        for swap in plan_swaps(_in_blocks(debts, debtors), self._least):
            if all(map(self._ready, swap.cycle)) and not self._rests_at(swap.cycle, now):
                self._begin(swap, debtors)

    def describe(self) -> dict[str, object]:
        """Return the swaps under way and the latest that have ended, for `GET /admin/ledger`."""
        return self._history.describe(list(self._running))

    def close(self) -> None:
        """Begin no further swap, and wait for none."""
        self._closed = True
        for task in self._running.values():
            task.cancel()

    def _ready(self, instance: EngineId) -> bool:
        """Whether an engine is in no swap, and its row is newer than its last one."""
        if any(instance in swap.cycle for swap in self._running):
            return False
        row = self._ledger.row(instance)
        return row is not None and row.heard > self._swapped.get(instance, -1.0)

    def _rests_at(self, cycle: tuple[EngineId, ...], now: float) -> bool:
        until, _ = self._rests.get(_same(cycle), (now, 0.0))
        return now < until

    def _begin(self, planned: Swap, debtors: Mapping[EngineId, Debtor]) -> None:
        orders = []
        swap = BlockSwap(uuid.uuid4().hex, planned.cycle, planned.amount)
        for debtor, creditor in planned.edges:
            row = self._ledger.row(creditor)
            if row is None:  # it has just left
                return
            order = LendHome(
                swap=swap.id,
                creditor=creditor,
                creditor_epoch=row.epoch,
                blocks=planned.amount,
                freeze_ms=round(1000 * FREEZE_S),
            )
            orders.append((debtors[debtor], order))
        log.info("swap %s: %d blocks each around %s", swap.id, swap.blocks, " → ".join(swap.cycle))
        self._running[swap] = self._tasks.create_task(self._run(swap, orders))
        self._begun(swap)

    async def _run(self, swap: BlockSwap, orders: list[tuple[Debtor, LendHome]]) -> None:
        begun = self._clock()
        try:
            async with asyncio.TaskGroup() as tasks:
                for debtor, order in orders:
                    tasks.create_task(self._bring_home(swap, debtor, order))
        finally:
            now = self._clock()
            del self._running[swap]
            self._swapped |= dict.fromkeys(swap.cycle, now)
            self._rest(swap, now)
        swap.seconds = now - begun
        self._history.add(swap)
        log.info(
            "swap %s: %s; blocks came home to %s; refused by %s",
            swap.id, swap.outcome, swap.home, swap.refused,
        )  # fmt: skip
        self._ended(swap)

    async def _bring_home(self, swap: BlockSwap, debtor: Debtor, order: LendHome) -> None:
        """Order one debtor; note its answer. Errors end only its own part."""
        try:
            async with asyncio.timeout(FREEZE_S + ANSWER_S):
                reply = await debtor.bring_home(order)
        except MicroserveError as error:
            swap.refused[debtor.instance] = error.type, error.message
        except TimeoutError:
            swap.refused[debtor.instance] = "timeout", "it did not answer in time"
        except Exception as error:
            log.exception("%s could not be ordered to bring blocks home", debtor.instance)
            swap.refused[debtor.instance] = "internal", type(error).__name__
        else:
            swap.home[debtor.instance] = min(reply.blocks, order.blocks)

    def _rest(self, swap: BlockSwap, now: float) -> None:
        """Let the cycle rest, and forget those that have rested for long."""
        cycle = _same(swap.cycle)
        _, rest_s = self._rests.get(cycle, (0.0, 0.0))
        rest_s = FIRST_REST_S if swap.total or not rest_s else min(2 * rest_s, LONGEST_REST_S)
        self._rests[cycle] = now + rest_s, rest_s
        self._rests = {
            each: (until, rest)
            for each, (until, rest) in self._rests.items()
            if now < until + LONGEST_REST_S
        }
        self._swapped = {
            each: at for each, at in self._swapped.items() if self._ledger.row(each) is not None
        }


def _in_blocks(debts: Mapping[Edge, int], debtors: Mapping[EngineId, Debtor]) -> dict[Edge, int]:
    """Return the debts of these debtors in whole blocks."""
    return {
        (debtor, creditor): pages // debtors[debtor].block_pages
        for (debtor, creditor), pages in debts.items()
        if debtor in debtors
    }


def _same(cycle: tuple[EngineId, ...]) -> tuple[EngineId, ...]:
    """Return the cycle from its first instance by name."""
    first = cycle.index(min(cycle))
    return cycle[first:] + cycle[:first]
