"""Routers that share a store agree on what runs: each change is a compare-and-set of one document.

A router applies a document after it was committed, never before, so no request runs under a
revision that was never active. Numbers only grow. A router that finds the store without its
document, or with an older one, puts its own back: the newest of all routers' documents wins, and
until all had time for it (`RESTORE_S`), nothing else is committed.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import orjson

from engine.protocol import BadRequest
from router.agreement.following import Following
from router.agreement.sources import Sources
from router.agreement.truth import Activation, Truth
from router.base import Conflict, StoreUnavailable
from router.rollout import FALLBACK, ITSELF, AuditLog, CanaryRules, Catalog, Changed, Rollout
from router.store import MOST_DOCUMENT, RESTORE_S, Change, Document, SharedStore
from router.strategy import Bound, Strategy

__all__ = ["Agreement"]

log = logging.getLogger(__name__)

JOIN_S = 10.0  # for the store to answer when a router starts
LOOK_S = 1.0  # between two looks at the store without a notice
MEMBER_S = 5.0  # without a sign of life, a router counts as gone
SEEN_S = 2.0  # longest wait for the other routers to run a change
UNSAVED = 1000  # entries of the audit log that wait for the store
MOST_ENTRY = 1 << 16  # bytes of an entry of the audit log
ROUTERS = "routers"

Make = Callable[[Truth], Truth]


class Agreement:
    """Implements `Changes` and `Decisions` for a router that shares a store."""

    def __init__(
        self, store: SharedStore, rollout: Rollout, catalog: Catalog, audit_log: AuditLog, name: str
    ) -> None:
        """`name` is unique to this process."""
        self.name = name
        self.routers = 1  # that were there when the store was last looked at
        self.first = False  # whether this one was the first of them by name
        self._store = store
        self._audit_log = audit_log
        self._catalog = catalog
        self._sources = Sources(store, catalog)
        self._following = Following(rollout, self._sources)
        self._rollout = rollout
        self._unsaved: deque[dict[str, Any]] = deque(maxlen=UNSAVED)
        self._tallies: dict[int, list[int]] = {}  # of canaries: ended, failed, slow, by number
        self._dismissals: dict[int, str] = {}
        self._work = asyncio.Event()
        self._lost_at: float | None = None
        rollout.decisions = self

    async def join(self, first: Bound) -> None:
        """Adopt what the store says, or store `first` if it says nothing.

        Raises `StoreUnavailable` if it does not answer within `JOIN_S` seconds, and what
        `Sources.bind` raises if this router cannot run what is active.
        """
        activation, sources = self._sources.describe(first)
        until = self._now() + JOIN_S
        while True:
            try:
                document = await self._store.get()
                if document.version == 0:
                    truth = Truth.first(msgspec.structs.replace(activation, number=1))
                    await self._create(truth, sources)
                    continue
                await self._following.begin(document, first, activation)
                break
            except StoreUnavailable:
                if self._now() > until:
                    raise
                await asyncio.sleep(0.2)
        told = self._described(self._following.truth.active)
        await self.note(ITSELF, "started", **told)
        await self._announce()

    async def run(self) -> None:
        """Follow the store until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow(), name="follow the store")
            tasks.create_task(self._decide(), name="shared decisions")

    async def leave(self) -> None:
        """Tell the others that this router ends."""
        try:
            await self._store.withdraw(ROUTERS, self.name)
        except StoreUnavailable:
            log.info("the store is lost: the other routers notice later that this one is gone")

    # Changes

    async def activate(
        self,
        who: str,
        bound: Bound,
        *,
        if_generation: int | None = None,
        rules: CanaryRules | None = None,
    ) -> Changed:
        wanted, sources = self._sources.describe(bound)

        def edit(truth: Truth) -> Truth:
            truth.check(if_generation)
            if rules is not None:
                return truth.try_out(who, wanted, rules)
            return truth.activate(who, wanted)

        truth = await self._commit(edit, sources=sources, bound=bound)
        return await self._changed(truth.edit.number, bound)

    async def rollback(self, who: str) -> Changed:
        truth = await self._commit(lambda truth: truth.rollback(who))
        active = truth.active
        return await self._changed(active.number, await self._sources.bind(active))

    async def loaded(self, who: str, strategy: Strategy) -> None:
        activation, sources = self._sources.describe(strategy.bind({}))
        source, names = activation.source, self._catalog.names_with(strategy)
        if source is None:
            raise BadRequest(f"strategy {strategy.name} has no source", param="source")
        entry = AuditLog.entry(who, "load", name=strategy.name, source_sha256=activation.digest)
        await self._commit(
            lambda truth: truth.listing(who, dict.fromkeys(names, source)),
            sources=sources,
            entries=[entry],
        )
        await self._pending()
        self._rollout.told_of_load(who, strategy)

    async def note(self, who: str, what: str, **fields: Any) -> None:
        """As `Changes`. Without the store, the entry is added once the store returns."""
        entry = AuditLog.entry(who, what, **fields, router=self.name)
        self._audit_log.add(entry)
        self._unsaved.append(entry)
        try:
            await self._save()
        except StoreUnavailable:
            log.info("an entry of the audit log waits for the store: %s", what)

    async def entries(self) -> list[dict[str, Any]]:
        return [
            {"number": entry.number, **orjson.loads(entry.value)}
            for entry in await self._store.log()
        ]

    def store(self) -> dict[str, Any]:
        told: dict[str, Any] = {"status": "ok", "router": self.name, "routers": self.routers}
        if self._lost_at is not None or not self._store.available:
            since = self._lost_at if self._lost_at is not None else self._now()
            told |= {"status": "lost", "lost_s": round(self._now() - since, 1)}
        return {**told, **self._following.describe()}

    # Decisions

    def judged(self, number: int, *, failed: bool, slow: bool) -> None:
        tally = self._tallies.setdefault(number, [0, 0, 0])
        for i, more in enumerate((True, failed, slow)):
            tally[i] += more
        self._work.set()

    def dismiss(self, number: int, why: str) -> None:
        self._dismissals[number] = why
        self._work.set()

    # The store

    async def _follow(self) -> None:
        seen = 0
        while True:
            try:
                await self._synchronize()
                await self._save()
                await self._announce()
                routers = await self._store.members(ROUTERS)
                self.routers = max(1, len(routers))
                self.first = self.name == min(routers, default=self.name)
                if self._rollout.revisions.candidate is not None:
                    await self._judge()
                if self._lost_at is not None:
                    log.warning("the store is back")
                self._lost_at = None
            except StoreUnavailable as error:
                if self._lost_at is None:
                    self._lost_at = self._now()
                    log.warning("%s; no strategy is swapped until it does", error.message)
            except Exception:
                log.exception("the store cannot be followed")
            seen = await self._store.wait(seen, LOOK_S)

    async def _synchronize(self) -> None:
        document = await self._store.get()
        mine = self._following.document
        if document.version >= mine.version:
            await self._following.apply(document)
            return
        # A reply that was under way while this router committed is refused here as stale.
        truth = self._following.truth.restored()
        new = Document(mine.version, truth.encode())
        entry = AuditLog.entry(ITSELF, "restored", **self._described(truth.active))
        change = Change(
            document.version, new, self._sources.texts, [], [_encoded(entry)], restoring=True
        )
        if await self._store.commit(change) == "done":
            log.warning("the store had lost generation %d; it is put back", truth.active.number)
            await self._following.apply(new)

    async def _create(self, truth: Truth, sources: dict[str, bytes]) -> None:
        new = Document(1, truth.encode())
        await self._store.commit(Change(0, new, sources, restoring=True))

    async def _commit(
        self,
        edit: Make,
        *,
        sources: dict[str, bytes] | None = None,
        bound: Bound | None = None,
        entries: list[dict[str, Any]] | None = None,
    ) -> Truth:
        """Change the document by `edit`; return the new truth, which this router has applied.

        Raises what `edit` raises, `BadRequest` if the document becomes too large, and
        `StoreUnavailable`.
        """
        if self._lost_at is not None:
            raise StoreUnavailable("the store is lost: no strategy is swapped until it is back")
        until = self._now() + RESTORE_S + 2.0
        while True:
            await self._synchronize()
            document, truth = self._following.document, self._following.truth
            edited = edit(truth)
            noted = self._entries(truth, edited) if entries is None else entries
            new = Document(document.version + 1, edited.encode())
            if len(new.value) > MOST_DOCUMENT:
                raise BadRequest("the parameters of the latest activations are too large together")
            dropped = sorted(truth.digests - edited.digests)
            change = Change(
                document.version, new, sources or {}, dropped, [_encoded(one) for one in noted]
            )
            outcome = await self._store.commit(change)
            if outcome == "done":
                for one in noted:
                    self._audit_log.add(one)
                self._following.knows(edited.edit.number, bound)
                await self._following.apply(new, decided_here=True)
                return edited
            if self._now() > until:
                raise StoreUnavailable("the store was restored just now; try again")
            await asyncio.sleep(0.1 if outcome == "settling" else 0.0)

    async def _changed(self, number: int, bound: Bound) -> Changed:
        """Wait until the other routers run the change; tell which do not."""
        pending = await self._pending()
        for revision in self._rollout.revisions.live():
            if revision.number == number:
                return Changed(revision, pending)
        return Changed(self._rollout.revisions.made(number, bound), pending)  # superseded already

    async def _pending(self) -> list[str]:
        """Wait until all routers have applied this one's document, for `SEEN_S` at most.

        Returns those that have not, or that cannot load it.
        """
        version, until, seen = self._following.document.version, self._now() + SEEN_S, 0
        pending: list[str] = []
        try:
            await self._announce()
            while True:
                members = await self._store.members(ROUTERS)
                said = {id: orjson.loads(value) for id, value in members.items()}
                behind = {id for id, one in said.items() if one["version"] < version}
                pending = sorted(behind | {id for id, one in said.items() if one["failed"]})
                if not behind or self._now() > until:
                    return pending
                seen = await self._store.wait(seen, 0.1)
        except StoreUnavailable:
            return pending

    async def _announce(self) -> None:
        following = self._following
        told = {"version": following.document.version, "failed": bool(following.failed)}
        await self._store.announce(ROUTERS, self.name, orjson.dumps(told), MEMBER_S)

    async def _save(self) -> None:
        while self._unsaved:
            entry = self._unsaved.popleft()
            try:
                await self._store.append(_encoded(entry))
            except StoreUnavailable:
                self._unsaved.appendleft(entry)
                raise

    async def _decide(self) -> None:
        """Make this router's own decisions, again if the store was lost meanwhile."""
        while True:
            await self._work.wait()
            self._work.clear()
            try:
                await self._judge()
                for number, why in list(self._dismissals.items()):
                    await self._dismiss(number, why)
                    del self._dismissals[number]
            except StoreUnavailable:
                await asyncio.sleep(LOOK_S)
                self._work.set()
            except Exception:
                log.exception("a decision about a strategy failed")

    async def _judge(self) -> None:
        """Add up the results of the canary of all routers, and decide if there is a verdict."""
        canary, candidate = self._rollout.revisions.canary, self._rollout.revisions.candidate
        if canary is None or candidate is None:
            self._tallies.clear()
            return
        number = candidate.number
        tally = self._tallies.get(number, [0, 0, 0])
        totals = await self._store.report(f"canary:{number}", self.name, list(tally))
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

    def _entries(self, old: Truth, new: Truth) -> list[dict[str, Any]]:
        """Return the entries of the audit log that tell how a truth became another one."""
        entries, edit = [], new.edit
        ended = old.trial is not None and new.trial is None and edit.what != "promote"
        if old.trial is not None and ended:
            why = (new.last_trial or {}).get("why", "")
            told = self._described(old.trial.activation)
            entries.append(AuditLog.entry(ITSELF, "canary_rolled_back", **told, why=why))
        if edit.what != "canary_rolled_back":
            tried = new.trial is not None and edit.what == "canary"
            one = new.trial.activation if tried and new.trial is not None else new.active
            why_told = {"why": edit.why} if edit.why else {}
            entries.append(AuditLog.entry(edit.who, edit.what, **self._described(one), **why_told))
        return [{**entry, "router": self.name} for entry in entries]

    @staticmethod
    def _described(activation: Activation) -> dict[str, Any]:
        return {
            "name": activation.name,
            "params": activation.params,
            "source_sha256": activation.digest,
            "generation": activation.number,
        }

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


def _encoded(entry: dict[str, Any]) -> bytes:
    """Encode an entry of the audit log, without parameters that are too large to keep."""
    data = orjson.dumps(entry, option=orjson.OPT_NON_STR_KEYS)
    if len(data) <= MOST_ENTRY:
        return data
    return orjson.dumps({**entry, "params": "too large to keep"}, option=orjson.OPT_NON_STR_KEYS)
