"""Which engines have room for a context beyond their own pool (Infinite-LLM, section 4.6).

The length of a prompt is known before it runs, so a long one begins only where its blocks can be
borrowed. Otherwise several contexts would each hold a part of what they need, and wait for the
rest. Where the blocks lie is the debtor's choice: it asks for all of them at the start, and keeps
the end of the context.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Iterable
from typing import Final

from engine.protocol import BLOCK_TOKENS, NoCapacity
from router.base import EngineId
from router.engines.backend import Backend
from router.ledger import Ledger, block_pages

__all__ = ["Rooms"]

BEGINS_S: Final = 0.1  # within which a request that was let in has begun its generation


class Rooms:
    """The room of the engines that borrow, in tokens of context, as far as the ledger knows.

    Engines that do not borrow have room for their context, which their pool holds.
    """

    def __init__(
        self, ledger: Ledger, backends: Callable[[], Collection[Backend]], most_waiting: int
    ) -> None:
        """`backends` returns the engines that are known now."""
        self._ledger, self._backends = ledger, backends
        self._most_waiting = most_waiting
        self._least_own: float = math.inf  # tokens of the smallest pool of those that borrow
        self._let_in = -math.inf  # when one that waited was let in last, loop time
        self._changed = asyncio.Event()  # set only for a moment, to wake the waiters
        self._waiting: dict[object, None] = {}  # in the order of their arrival

    def changed(self) -> None:
        """Note that heartbeats have come, or engines have gone."""
        self._least_own = min(map(_own, filter(_borrows, self._backends())), default=math.inf)
        if self._waiting:
            self._changed.set()
            self._changed.clear()

    def outgrows(self, backend: Backend, tokens: int) -> bool:
        """Whether a context of so many tokens needs blocks of other engines there."""
        return tokens > self._least_own and _borrows(backend) and tokens > _own(backend)

    def leases(self, backend: Backend, tokens: int) -> bool:
        """Whether a receive lease there can be so long; half of the pool is the limit.

        True for engines that do not borrow: their context bounds what they are asked for.
        """
        return not _borrows(backend) or tokens <= _own(backend) // 2

    def narrow(self, backends: list[Backend], tokens: int) -> list[Backend]:
        """Return those that have room for a context now, or, without any, will have some.

        Empty if none of them will ever have room.
        """
        if tokens <= self._least_own:
            return backends
        return [each for each in backends if self._fits(each, tokens, now=True)] or [
            each for each in backends if self._fits(each, tokens, now=False)
        ]

    def short(self, backends: Iterable[Backend], tokens: int) -> bool:
        """Whether a context has to wait for room on one of these engines.

        So it does if others wait for it already. Without any engine there is nothing to wait for.
        """
        return self._waits(list(backends), tokens, first=not self._waiting)

    async def wait(
        self, candidates: Callable[[], Iterable[Backend]], tokens: int, deadline: float
    ) -> None:
        """Wait until none of `candidates` is short of room, in the order of arrival.

        One is let in at a time, by a change that `changed` notes: what it takes is counted only
        once its generation has begun. Raises `NoCapacity` at the `deadline` (loop time), or at once
        if too many wait.
        """
        if len(self._waiting) >= self._most_waiting:
            raise NoCapacity(f"{len(self._waiting)} long requests are waiting")
        place = object()
        self._waiting[place] = None
        try:
            async with asyncio.timeout_at(deadline):
                now = asyncio.get_running_loop().time
                while now() < self._let_in + BEGINS_S or self._waits(
                    list(candidates()), tokens, first=next(iter(self._waiting)) is place
                ):
                    await self._changed.wait()
                self._let_in = now()
        except TimeoutError:
            raise NoCapacity(
                f"others lend too little for {tokens} tokens now{self._best(candidates())}"
            ) from None
        finally:
            del self._waiting[place]

    def shortage(self, tokens: int) -> str:
        """Say which engine comes closest to room for a context that has room nowhere."""
        return f"no engine has room for {tokens} tokens{self._best(self._backends())}"

    def _waits(self, backends: list[Backend], tokens: int, *, first: bool) -> bool:
        """Whether a context waits for one of these engines; `first`: no other one waits before."""
        if not backends or not all(self.outgrows(each, tokens) for each in backends):
            return False
        return not first or not any(self._fits(each, tokens, now=True) for each in backends)

    def _fits(self, backend: Backend, tokens: int, *, now: bool) -> bool:
        return not self.outgrows(backend, tokens) or tokens <= self._most(backend, now=now)

    def _most(self, backend: Backend, *, now: bool) -> float:
        """Return the longest context that an engine with `--borrow` has room for, in tokens.

        Not `now`: once all other contexts have ended. What the long contexts of this router lack
        yet counts as taken, as the ledger does not show it: blocks of others, and pages of the
        pools where they run. Otherwise requests that come at once would all be let in, each on
        pages that the others are about to fill, and would take them from each other over and over.
        """
        state = backend.state
        if state is None or state.page_size < 1:
            return math.inf
        instance = EngineId(state.engine_id)
        pages = block_pages(state.page_size)
        found, ever = self._ledger.blocks_for(instance, pages, self._leaves(backend))
        if not now:
            return _own(backend) + BLOCK_TOKENS * ever
        found -= sum(self._lacks(other) for other in self._backends() if other is not backend)
        blocks = max(found, 0) + self._ledger.borrowed(instance) // pages
        return max(_own(backend) + BLOCK_TOKENS * blocks - backend.load.contexts, 0)

    def _leaves(self, backend: Backend) -> dict[EngineId, int]:
        """Return the pages that long contexts leave of the pools of other engines."""
        found = {}
        for other in self._backends():
            state = other.state
            if other is not backend and state is not None and other.load.contexts:
                instance, size = EngineId(state.engine_id), max(state.page_size, 1)
                row = self._ledger.row(instance)
                lent = sum(row.lent.values()) if row is not None else 0
                found[instance] = state.pages.total - -(-other.load.contexts // size) - lent
        return found

    def _lacks(self, backend: Backend) -> int:
        """Return the blocks that an engine has yet to borrow for contexts that run there."""
        state = backend.state
        if state is None or state.page_size < 1 or not backend.load.contexts:
            return 0
        pages = block_pages(state.page_size)
        needs = -(-max(backend.load.contexts - _own(backend), 0) // BLOCK_TOKENS)
        return max(needs - self._ledger.borrowed(EngineId(state.engine_id)) // pages, 0)

    def _best(self, backends: Iterable[Backend]) -> str:
        """Say how much the engine holds that holds most; empty if that is unknown."""
        known = [
            (most, each.id, _own(each))
            for each in backends
            if _borrows(each) and each.usable and (most := self._most(each, now=False)) < math.inf
        ]
        if not known:
            return ""
        most, id, own = max(known)
        return f"; {id} holds {own}, and {most:.0f} with all that others lend"


def _borrows(backend: Backend) -> bool:
    return backend.state is not None and backend.state.borrowing is not None


def _own(backend: Backend) -> int:
    """Return the tokens that its own pool holds."""
    state = backend.state
    return state.pages.total * state.page_size if state is not None else 0
