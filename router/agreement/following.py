"""What a router has applied of the store's documents."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from engine.protocol import MicroserveError
from router.agreement.sources import Sources
from router.agreement.truth import Activation, Trial, Truth
from router.base import RevisionNumber, StoreUnavailable
from router.rollout import Canary, Rollout
from router.store import Document
from router.strategy import Bound

__all__ = ["Following"]

log = logging.getLogger(__name__)

RETRY_S = 10.0  # between two tries to load what could not be loaded


class Following:
    """Applies documents to a router's revisions, in the order of their versions.

    A strategy that cannot be loaded here is named in `failed`, with the reason. The router keeps
    what it ran before, and tries again from time to time. `document` and `truth` are the applied
    ones.
    """

    document: Document
    truth: Truth

    def __init__(self, rollout: Rollout, sources: Sources) -> None:
        self.failed: dict[str, str] = {}
        self._rollout = rollout
        self._sources = sources
        self._bounds: dict[int, Bound] = {}  # by number
        self._applying = asyncio.Lock()
        self._tried_at = 0.0

    async def begin(self, document: Document, own: Bound, activation: Activation) -> None:
        """Apply a first document; `own` is used if it is what the document says.

        Raises what `Sources.bind` and `Truth.decode` raise.
        """
        truth = Truth.decode(document.value)
        active = truth.active
        if (active.name, active.params, active.digest) == (
            activation.name, activation.params, activation.digest,
        ):  # fmt: skip
            bound = own
        else:
            log.warning(
                "the routers of this store run generation %d, strategy %s; --strategy is not used",
                active.number, active.name,
            )  # fmt: skip
            bound = await self._sources.bind(active)
        self._bounds[active.number] = bound
        self._rollout.revisions.begin(RevisionNumber(active.number), bound)
        self.document, self.truth = Document(0, b""), truth
        await self.apply(document)

    def knows(self, number: int, bound: Bound | None) -> None:
        """Use `bound` for an activation made here."""
        if bound is not None:
            self._bounds[number] = bound

    async def apply(self, document: Document, *, decided_here: bool = False) -> None:
        """Apply a document that is committed, unless a newer one is applied.

        Raises `StoreUnavailable` if a source cannot be fetched now, and `StoreUnreadable`; nothing
        is applied then.
        """
        async with self._applying:
            if document.version < self.document.version:
                return
            now = asyncio.get_running_loop().time()
            again = bool(self.failed) and now > self._tried_at + RETRY_S
            if document == self.document and not again:
                return
            self._tried_at = now
            truth = Truth.decode(document.value)
            await self._sources.keep(truth.digests)
            failed = await self._sources.follow(truth.listed)
            active = await self._bound(truth.active, failed)
            trial = None
            if truth.trial is not None:
                trial = await self._trial(truth.trial, failed)
            old, self.document, self.truth, self.failed = self.truth, document, truth, failed
            kept = {truth.active.number, *([trial[0]] if trial is not None else [])}
            self._bounds = {number: one for number, one in self._bounds.items() if number in kept}
            number = RevisionNumber(truth.active.number)
            self._rollout.revisions.follow(number, active, trial)
            self._rollout.last_canary = truth.last_trial
            self._tell(old, truth, decided_here=decided_here)

    def _tell(self, old: Truth, new: Truth, *, decided_here: bool) -> None:
        """Publish and log what has changed.

        `decided_here`: by this router, which alone counts it in the metrics.
        """
        edit, rollout = new.edit, self._rollout
        if new.active.number != old.active.number:
            rollout.tell_swap(edit.who, edit.what, edit.why)
            label = rollout.revisions.active.label
            log.info("%s: %s %s: %s", edit.who, edit.what, label, edit.why)
        if new.trial == old.trial:
            return
        ended, told = old.trial, dict(new.last_trial or {})
        if ended is not None and told.get("generation") == ended.activation.number:
            rollout.tell_canary(ended.activation.name, told, counted=decided_here)
        if new.trial is not None:
            begun = new.trial.activation
            told = {"generation": begun.number, "decision": "begun", "why": ""}
            rollout.tell_canary(begun.name, told, counted=decided_here)

    def describe(self) -> dict[str, Any]:
        """Return what `/health` says of it."""
        told: dict[str, Any] = {"generation": self.truth.active.number}
        if self.failed:
            told["cannot_load"] = self.failed
        if self._sources.differing:
            told["other_version"] = sorted(self._sources.differing)
        return told

    async def _bound(self, activation: Activation, failed: dict[str, str]) -> Bound | None:
        """Return what to run, or `None` with the reason in `failed`."""
        if (known := self._bounds.get(activation.number)) is not None:
            return known
        try:
            bound = self._bounds[activation.number] = await self._sources.bind(activation)
        except StoreUnavailable:
            raise
        except MicroserveError as error:
            if activation.name not in self.failed:
                log.error("generation %d cannot be run: %s", activation.number, error.message)
            failed[activation.name] = error.message
            return None
        return bound

    async def _trial(
        self, trial: Trial, failed: dict[str, str]
    ) -> tuple[RevisionNumber, Bound, Canary] | None:
        bound = await self._bound(trial.activation, failed)
        if bound is None:
            return None
        canary = Canary(trial.rules)
        canary.since = trial.since
        return RevisionNumber(trial.activation.number), bound, canary
