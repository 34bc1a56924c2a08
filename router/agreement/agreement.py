"""Routers that share a store agree on what runs: each change is a compare-and-set of one document.

A router applies a document after it was committed, never before, so no request runs under a
revision that was never active. Numbers only grow. A router that finds the store without its
document, or with an older one, puts its own back: the newest of all routers' documents wins, and
until all had time for it (`RESTORE_S`), nothing else is committed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from engine.protocol import BadRequest
from router.agreement.decisions import SharedDecisions
from router.agreement.following import Following
from router.agreement.presence import SEEN_S, Presence
from router.agreement.shared_log import SharedLog, described, encoded, entries_of
from router.agreement.sources import Sources
from router.agreement.truth import Truth
from router.base import StoreUnavailable, StoreUnreadable
from router.rollout import ITSELF, AuditLog, Catalog, Changed, Rollout, Wanted
from router.store import MOST_DOCUMENT, RESTORE_S, Change, Document, Notices, SharedStore
from router.strategy import Bound, Strategy

__all__ = ["Agreement"]

log = logging.getLogger(__name__)

JOIN_S = 10.0  # for the store to answer when a router starts
LEAVE_S = 1.0  # for the store to answer when a router ends
LOOK_S = 1.0  # between two looks at the store without a notice
STALE_S = SEEN_S  # after so long without a look at the store, no request begins before the next one
CONFIRM_S = 5.0  # longest wait of a request for it

Make = Callable[[Truth], Truth]


class Agreement:
    """Implements `Changes` for a router that shares a store."""

    def __init__(
        self, store: SharedStore, rollout: Rollout, catalog: Catalog, audit_log: AuditLog, name: str
    ) -> None:
        """`name` is unique to this process."""
        self.name = name
        self._store = store
        self._audit_log = audit_log
        self._log = SharedLog(store, audit_log, name)
        self._presence = Presence(store, name)
        self._catalog = catalog
        self._sources = Sources(store, catalog)
        self._following = Following(rollout, self._sources)
        self._rollout = rollout
        self._lost: StoreUnavailable | None = None
        self._lost_at = 0.0
        self._confirmed_at = 0.0  # a look at the store that began then found what is applied
        self._looks = Notices()  # ends of looks at the store
        self._left = False
        self._decisions = SharedDecisions(
            store, rollout, catalog, self._sources, name, self._commit
        )
        rollout.decisions = self._decisions

    @property
    def routers(self) -> int:
        """How many there were when the store was last looked at."""
        return self._presence.count

    @property
    def first(self) -> bool:
        """Whether this router is the first of all by name, at the latest look."""
        return self._presence.first

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
            except StoreUnreadable:
                raise
            except StoreUnavailable:
                if self._now() > until:
                    raise
                await asyncio.sleep(0.2)
        told = described(self._following.truth.active)
        await self.note(ITSELF, "started", **told)
        await self._announce()
        await self._synchronize()  # changes made before the announcement did not wait for this one

    async def run(self) -> None:
        """Follow the store until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow(), name="follow the store")
            tasks.create_task(self._decisions.run(), name="shared decisions")

    async def leave(self) -> None:
        """Tell the others that this router ends. `run` follows the store no longer.

        A store that does not answer delays it by `LEAVE_S` at most.
        """
        self._left = True
        try:
            async with asyncio.timeout(LEAVE_S):
                await self._presence.withdraw()
        except (StoreUnavailable, TimeoutError):
            log.info("the store is lost: the other routers notice later that this one is gone")

    # Changes

    async def activate(self, who: str, wanted: Wanted) -> Changed:
        activation, sources = self._sources.describe(wanted.bound)

        def edit(truth: Truth) -> Truth:
            truth.check(wanted.if_generation)
            if wanted.rules is not None:
                return truth.try_out(who, activation, wanted.rules)
            return truth.activate(who, activation)

        truth = await self._commit(edit, sources=sources, bound=wanted.bound)
        return await self._changed(truth.edit.number, wanted.bound)

    async def promote(self, who: str, number: int) -> Changed:
        canary, why = self._rollout.revisions.canary, f"{who} promotes it"
        account = canary.describe() if canary is not None else {}
        truth = await self._commit(lambda truth: truth.promote(number, why, account, who))
        return await self._changed(number, await self._sources.bind(truth.active))

    async def rollback(self, who: str) -> Changed:
        truth = await self._commit(lambda truth: truth.rollback(who))
        active = truth.active
        return await self._changed(active.number, await self._sources.bind(active))

    @property
    def can_roll_back(self) -> bool:
        truth = self._following.truth
        return truth.trial is not None or bool(truth.before)

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
        await self._log.note(who, what, **fields)

    async def entries(self) -> list[dict[str, Any]]:
        return await self._log.entries()

    def store(self) -> dict[str, Any]:
        told: dict[str, Any] = {"status": "ok", "router": self.name, "routers": self.routers}
        if self._lost is not None or not self._store.available:
            status = "unreadable" if isinstance(self._lost, StoreUnreadable) else "lost"
            since = self._lost_at if self._lost is not None else self._now()
            told |= {"status": status, "lost_s": round(self._now() - since, 1)}
        return {**told, **self._following.describe()}

    @property
    def stale(self) -> bool:
        """Whether another generation may have been active for `STALE_S`, unknown to this router.

        So it is after the process was stopped. Without the store it goes on with what it has.
        """
        return self._lost is None and self._now() - self._confirmed_at > STALE_S

    async def confirm(self) -> None:
        """Wait for the next look at the store, for `CONFIRM_S` at most."""
        until = self._now() + CONFIRM_S
        seen = await self._looks.wait(-1, 0.0)
        while self.stale and (left := until - self._now()) > 0:
            seen = await self._looks.wait(seen, left)

    # The store

    async def _follow(self) -> None:
        seen = 0
        while not self._left:
            try:
                await self._synchronize()
                await self._log.save()
                await self._announce()
                await self._presence.look()
                if self._rollout.revisions.candidate is not None:
                    await self._decisions.judge()
                if self._lost is not None:
                    log.warning("the store is back")
                self._lost = None
            except StoreUnavailable as error:
                if self._lost is None:
                    self._lost_at = self._now()
                    log.warning("%s. No strategy is swapped until this ends", error.message)
                self._lost = error
            except Exception:
                log.exception("the store cannot be followed")
            self._looks.notify()
            seen = await self._store.wait(seen, LOOK_S)

    async def _synchronize(self) -> None:
        asked_at = self._now()
        document = await self._store.get()
        mine = self._following.document
        if document.version >= mine.version:
            await self._following.apply(document)
            self._confirmed_at = max(asked_at, self._confirmed_at)
            return
        # A reply that was under way while this router committed is refused here as stale.
        truth = self._following.truth.restored()
        new = Document(mine.version, truth.encode())
        entry = AuditLog.entry(ITSELF, "restored", **described(truth.active))
        change = Change(
            document.version, new, self._sources.texts, [], [encoded(entry)], restoring=True
        )
        if await self._store.commit(change) == "done":
            log.warning("the store had lost generation %d; it is put back", truth.active.number)
            await self._following.apply(new)
            self._confirmed_at = asked_at

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
        if self._lost is not None:
            refused = "no strategy is swapped until this ends"
            if isinstance(self._lost, StoreUnreadable):
                raise StoreUnreadable(f"{self._lost.message}. Meanwhile, {refused}")
            raise StoreUnavailable(f"the store is lost: {refused}")
        until = self._now() + RESTORE_S + 2.0
        while True:
            await self._synchronize()
            document, truth = self._following.document, self._following.truth
            edited = edit(truth)
            noted = entries_of(truth, edited, self.name) if entries is None else entries
            new = Document(document.version + 1, edited.encode())
            if len(new.value) > MOST_DOCUMENT:
                raise BadRequest("the parameters of the latest activations are too large together")
            dropped = sorted(truth.digests - edited.digests)
            change = Change(
                document.version, new, sources or {}, dropped, [encoded(one) for one in noted]
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
        """Wait until the other routers have applied this one's document, for a bounded time.

        Returns those that have not, or that cannot load it.
        """
        with suppress(StoreUnavailable):
            await self._announce()
        return await self._presence.pending(self._following.document.version)

    async def _announce(self) -> None:
        following = self._following
        version, failed = following.document.version, bool(following.failed)
        await self._presence.announce(version, failed=failed)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
