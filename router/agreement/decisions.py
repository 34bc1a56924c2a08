"""What routers decide themselves, together: a canary's verdict, and the end of a bad strategy."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from router.agreement.sources import Sources
from router.agreement.truth import Truth
from router.base import Conflict, StoreUnavailable
from router.rollout import FALLBACK, ITSELF, Catalog, Rollout
from router.store import SharedStore

__all__ = ["SharedDecisions"]

log = logging.getLogger(__name__)

AGAIN_S = 1.0  # between two tries while the store is lost

Commit = Callable[[Callable[[Truth], Truth]], Awaitable[Truth]]


class SharedDecisions:
    """Implements `Decisions`. Whichever router sees a budget spent makes the change."""

    def __init__(
        self,
        store: SharedStore,
        rollout: Rollout,
        catalog: Catalog,
        sources: Sources,
        name: str,
        commit: Commit,
    ) -> None:
        """`name` is this router's; `commit` changes the document."""
        self._store = store
        self._rollout = rollout
        self._catalog = catalog
        self._sources = sources
        self._name = name
        self._commit = commit
        self._tallies: dict[int, list[int]] = {}  # of canaries: ended, failed, slow, by number
        self._dismissals: dict[int, str] = {}
        self._work = asyncio.Event()

    def judged(self, number: int, *, failed: bool, ttft_ms: float | None) -> None:
        canary = self._rollout.revisions.canary
        slow = canary is not None and canary.is_slow(failed=failed, ttft_ms=ttft_ms)
        tally = self._tallies.setdefault(number, [0, 0, 0])
        for i, more in enumerate((True, failed, slow)):
            tally[i] += more
        self._work.set()

    def dismiss(self, number: int, why: str) -> None:
        self._dismissals[number] = why
        self._work.set()

    async def run(self) -> None:
        """Decide what is due, again if the store was lost meanwhile, until cancelled."""
        while True:
            await self._work.wait()
            self._work.clear()
            try:
                await self.judge()
                for number, why in list(self._dismissals.items()):
                    await self._dismiss(number, why)
                    del self._dismissals[number]
            except StoreUnavailable:
                await asyncio.sleep(AGAIN_S)
                self._work.set()
            except Exception:
                log.exception("a decision about a strategy failed")

    async def judge(self) -> None:
        """Add up the results of the canary of all routers, and decide if there is a verdict."""
        canary, candidate = self._rollout.revisions.canary, self._rollout.revisions.candidate
        if canary is None or candidate is None:
            self._tallies.clear()
            return
        number = candidate.number
        tally = self._tallies.get(number, [0, 0, 0])
        totals = await self._store.report(f"canary:{number}", self._name, list(tally))
        canary.ended, canary.failed, canary.slow = totals
        if (verdict := canary.verdict()) is None:
            return
        account, why = canary.describe(), verdict.why
        try:
            if verdict.decision == "promoted":
                await self._commit(lambda truth: truth.promote(number, why, account))
            else:
                await self._commit(lambda truth: truth.reject(number, why, account))
        except Conflict:
            log.debug("another router has decided about generation %d", number)

    async def _dismiss(self, number: int, why: str) -> None:
        def edit(truth: Truth) -> Truth:
            if truth.trial is not None and truth.trial.activation.number == number:
                return truth.reject(number, why, {})
            if truth.active.number != number:
                raise Conflict("it is not active any more")
            truth = truth.drop(ITSELF, f"generation {number} is dismissed: {why}")
            if truth.before:
                return truth.rollback(ITSELF, why)
            fallback, _ = self._sources.describe(self._catalog[FALLBACK].bind({}))
            return truth.activate(ITSELF, fallback, "fallback", why)

        try:
            await self._commit(edit)
        except Conflict:
            log.debug("another router has replaced generation %d", number)
