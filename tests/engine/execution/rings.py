"""Engines in this process that owe blocks to each other, in a ring."""

from __future__ import annotations

import time
from collections.abc import Sequence

from engine_helpers import generation, tiny
from long_contexts import EPOCH, PAGE, PER_BLOCK, Engine, Lending, Source, prompt

from engine.scheduling.jobs import Generation
from kvcache.borrowing import Borrowing, HomeOrder
from kvcache.remote_attention import AttentionShape, RemoteAttention
from kvcache.types import EngineId, PageId


class Member:
    """An engine that lends to the one before it, and borrows from the one behind."""

    def __init__(self, name: str, pages: int, lend_pages: int) -> None:
        self.engine = Engine(pages, name=name, lend_pages=lend_pages)
        self.cache = self.engine.cache
        self.lending = Lending(name, cache=self.cache)
        shape = AttentionShape.of(self.cache.layout, tiny().config.num_heads)
        self.remote = RemoteAttention(self.cache.identity, shape, timeout_s=20.0)
        self.source = Source(EngineId(name), [])
        self.source.connected = self.remote.connected
        self.cache.borrow(self.source, self.remote)
        self.others: list[PageId] = []  # pages that other users of the pool hold
        self.order: HomeOrder | None = None
        self.done = 0  # orders

    @property
    def elsewhere(self) -> Borrowing:
        assert self.cache.elsewhere is not None
        return self.cache.elsewhere

    @property
    def owed(self) -> int:
        """Blocks with the creditor."""
        return len(self.source.taken)

    @property
    def pool(self) -> int:
        with self.cache.lock:
            return self.cache.available

    def leave(self, pages: int) -> None:
        """Have others hold so much that `pages` pages are available, as far as that goes."""
        manager = self.cache.bookkeeping.pages
        with self.cache.lock:
            more = manager.available - pages
            if more > 0:
                self.others += manager.take(more)
            elif more < 0:
                manager.drop(self.others[more:])
                del self.others[more:]

    def bring_home(self, blocks: int) -> None:
        def done() -> None:
            self.done += 1

        (creditor,) = self.source.lending
        self.order = HomeOrder(creditor, EPOCH, blocks, done)
        with self.cache.lock:
            self.cache.bookkeeping.lender.freeze("swap", 60.0)
        self.source.greedy.add(creditor)
        self.elsewhere.order_home(self.order)


class Ring:
    """Each member owes to the next one, and the last one to the first."""

    def __init__(self, members: int, pages: int, lend_pages: int) -> None:
        self.members = [Member(f"ring-{n}", pages, lend_pages) for n in range(members)]
        for debtor, creditor in zip(
            self.members, [*self.members[1:], self.members[0]], strict=True
        ):
            name = creditor.lending.name
            debtor.source.lending[name] = creditor.lending
            debtor.remote.connect(name, creditor.lending.server.endpoints, EPOCH)
        self.jobs: list[Generation] = []

    def begin(self, length: int, max_tokens: int, tokens: int) -> None:
        """Start a generation on each member, and step until all of them have got `tokens` tokens.

        At first others leave no room for all of a prompt, so that its blocks move.
        """
        for number, member in enumerate(self.members):
            member.leave(-(-length // PAGE) - 1)
            job = generation(1, prompt(length, number), max_tokens=max_tokens)
            self.jobs.append(job)
            member.engine.stepper.submit(job)
        self.step_until(lambda: all(job.started for job in self.jobs))
        for member in self.members:
            member.leave(1 << 30)
        self.step_until(lambda: min(self.produced()) >= tokens)

    def produced(self) -> list[int]:
        return [
            len(member.engine.tokens(job))
            for member, job in zip(self.members, self.jobs, strict=True)
        ]

    def step_until(self, condition: object, limit_s: float = 30.0) -> None:
        """Step the members in turn. Each goes on if another waits."""
        assert callable(condition)
        until = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < until, [member.owed for member in self.members]
            worked = [member.engine.stepper.step().chunks for member in self.members]
            if not any(worked):
                time.sleep(0.0005)

    def finish(self, jobs: Sequence[Generation] = ()) -> None:
        left = list(zip(self.members, jobs or self.jobs, strict=True))
        self.step_until(
            lambda: all(
                any(output.generation is job and output.finish for output in member.engine.outputs)
                for member, job in left
            )
        )

    def check(self) -> None:
        """Check that all debts are repaid, and that all pages are accounted for."""
        for member in self.members:
            member.leave(1 << 30)
            member.engine.settle()
            member.engine.stepper.step()
        for member in self.members:
            member.cache.check_integrity()
            use = member.cache.page_use()
            assert use.free + use.cached == use.total
            assert not member.source.taken and member.lending.lent == 0

    def close(self) -> None:
        for member in self.members:
            member.source.close()
        for member in self.members:
            member.lending.server.close()
            member.cache.close()
            member.remote.close()


BLOCK_AND_A_PAGE = PER_BLOCK + 1  # what a member needs for a block that comes home
