"""Debtors, creditors and the router's lists over a network that loses, repeats and delays.

Everything but the network is what a deployment runs: `Keeper`, `Accounts`, `Asking`, the answers of
creditors, `Ledger` and `CreditorLists`.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual_engines import Engines, generate, tokens_of
from virtual_time import in_virtual_time

from engine.protocol import LendCreditors, LendHome, LendHomeReply, MicroserveError, PeerUnreachable
from engine.virtual import VirtualEngine, VirtualLoanCalls, output_tokens
from kvcache.types import LeaseId, PageId
from router.base import EngineId
from router.ledger import CreditorLists, Debtor, Ledger

CALL_S = 1.0  # after which a caller waits for no answer
HEARTBEAT_S = 0.5
LEASE_MS = 2000
FLAGS = {
    "page_size": 16, "pool_pages": 64, "token_budget": 256, "max_model_len": 4096,
    "borrow": True, "lend_share": 1.0, "lease_ms": LEASE_MS,
}  # fmt: skip


class LossyNetwork:
    """Delivers messages never, once or twice, each time later, until it is `mended`."""

    def __init__(self, seed: int, tasks: asyncio.TaskGroup, check: Callable[[], None]) -> None:
        self.random = random.Random(seed)
        self.tasks, self.check = tasks, check
        self.lost, self.repeated, self.slow = (self.random.uniform(0.1, 0.5) for _ in range(3))
        self.mended = False
        self.seen: Counter[str] = Counter()

    def drops(self) -> bool:
        if self.mended or self.random.random() >= self.lost:
            return False
        self.seen["lost"] += 1
        return True

    def copies(self) -> int:
        if self.drops():
            return 0
        twice = not self.mended and self.random.random() < self.repeated
        self.seen["repeated"] += twice
        return 1 + twice

    async def travel(self) -> None:
        slow = not self.mended and self.random.random() < self.slow
        self.seen["slow"] += slow
        await asyncio.sleep(self.random.uniform(0.001, 2.5 * CALL_S if slow else 0.05))

    async def ask(self, call: Callable[[], Awaitable[Any]]) -> Any:
        """Return the first answer that arrives, if one does so in time."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        async def deliver() -> None:
            await self.travel()
            outcome: Any = None
            failure: MicroserveError | None = None
            try:
                outcome = await call()
            except MicroserveError as error:
                failure = error
            self.check()
            if self.drops():
                return
            await self.travel()
            if answer.done():
                self.seen["late answer"] += 1
            elif failure is not None:
                answer.set_exception(failure)
            else:
                answer.set_result(outcome)

        for _ in range(self.copies()):
            self.tasks.create_task(deliver())
        try:
            async with asyncio.timeout(CALL_S):
                return await answer
        except TimeoutError:
            raise PeerUnreachable("no answer has arrived in time") from None


class LossyCalls(VirtualLoanCalls):
    """The calls of one debtor, over the network."""

    network: LossyNetwork

    async def _send(self, url: str, call: Any) -> Any:
        return await self.network.ask(partial(super()._send, url, call))


class World:
    """Engines that lend to each other, and a router that tells them whom to ask."""

    def __init__(self, seed: int, tasks: asyncio.TaskGroup) -> None:
        self.network = LossyNetwork(seed, tasks, self.check)

        def calls(*how: Any) -> LossyCalls:
            made = LossyCalls(*how)
            made.network = self.network
            return made

        self.engines = Engines("a", "b", "c", calls=calls, **FLAGS)
        self.ledger = Ledger(lambda *_: 1.0, asyncio.get_running_loop().time)
        self.lists = CreditorLists(
            self.ledger,
            lambda: [self._debtor(engine) for engine in self.engines.all.values()],
            lambda name: self.engines[name].identity.url,
            tasks,
        )
        self.router = tasks.create_task(self._router())

    async def _router(self) -> None:
        """Take heartbeats in, which arrive or not, and send lists."""
        while True:
            for engine in self.engines.all.values():
                if not self.network.drops() and (heartbeat := engine.state().heartbeat):
                    self.ledger.record(heartbeat)
            self.lists.send()
            await asyncio.sleep(HEARTBEAT_S)

    def _debtor(self, engine: VirtualEngine) -> Debtor:
        async def tell(wanted: LendCreditors) -> None:
            async def arrive() -> int:
                return engine.set_creditors(wanted)

            await self.network.ask(arrive)

        async def home(order: LendHome) -> LendHomeReply:
            return await engine.bring_home(order)

        name = engine.identity.engine_id
        return Debtor(EngineId(name), engine.identity.epoch, engine.config.page_size, tell, home)

    def check(self) -> None:
        """Check that what debtors may use is lent to them, and that every page has one user."""
        now = asyncio.get_running_loop().time()
        lent: dict[tuple[str, str, LeaseId], set[PageId]] = {}
        for engine in self.engines.all.values():
            lender = engine.cache.bookkeeping.lender
            lender.check()
            for loan in lender.loans():
                key = (engine.identity.engine_id, loan.debtor, loan.lease_id)
                if now <= loan.deadline:  # others may get the pages afterwards
                    lent[key] = set(loan.pages)
        for engine in self.engines.all.values():
            assert engine.borrowing is not None
            for debt in engine.borrowing._accounts._borrower.debts():
                key = (debt.creditor, engine.identity.engine_id, debt.lease_id)
                self.network.seen["used"] += len(debt.pages)
                assert set(debt.pages) <= lent.get(key, set()), f"{key} is used and not lent"

    async def watch(self) -> None:
        while True:
            self.check()
            await asyncio.sleep(0.1)

    async def client(self, number: int, source: random.Random) -> None:
        """Ask an engine for a generation, which may find that nobody lends."""
        await asyncio.sleep(source.uniform(0.0, 3.0))
        engine = source.choice(list(self.engines.all.values()))
        prompt = [
            source.randrange(1, 290) for _ in range(source.choice([40, 300, 900, 1300, 1700]))
        ]
        tokens = source.randrange(20, 200)
        with suppress(MicroserveError):
            stream = await engine.start_generate(generate(f"r{number}", prompt, tokens))
            assert await tokens_of(stream) == output_tokens(prompt, tokens)
            self.network.seen["complete"] += 1


async def history(seed: int) -> Counter[str]:
    """Run requests over a bad network, mend it, and check that every page is free again."""
    async with asyncio.TaskGroup() as tasks:
        world = World(seed, tasks)
        watching = tasks.create_task(world.watch())
        source = random.Random(seed)
        async with asyncio.TaskGroup() as clients:
            for number in range(5):
                clients.create_task(world.client(number, source))
        world.network.mended = True
        await asyncio.sleep(20.0)  # leases, loans in stock, and all that is under way
        await world.engines.rest()
        for engine in world.engines.all.values():
            bookkeeping = engine.cache.bookkeeping
            bookkeeping.lender.sweep()
            use = bookkeeping.page_use
            assert bookkeeping.lender.lent == 0
            assert use.free + use.cached == use.total
            world.network.seen["moved"] += engine.steps.stepper.stats.moved_blocks
        world.check()
        for task in (watching, world.router):
            task.cancel()
        world.lists.close()
    return world.network.seen


@pytest.mark.slow
@settings(max_examples=2, deadline=None)
@given(st.integers(0, 2**32))
def test_pages_in_use_are_lent_and_all_are_free_at_the_end(seed: int):
    in_virtual_time(history)(seed)


@pytest.mark.thorough
@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32))
def test_further_histories(seed: int):
    in_virtual_time(history)(seed)


@pytest.mark.slow
def test_the_histories_meet_every_case():
    seen: Counter[str] = Counter()

    @in_virtual_time
    async def run(seed: int) -> None:
        seen.update(await history(seed))

    for seed in range(2):
        run(seed)
    for case in ("lost", "repeated", "slow", "late answer", "used", "moved", "complete"):
        assert seen[case], case
