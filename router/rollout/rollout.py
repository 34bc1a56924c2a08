"""Changes which strategy runs: for an admin, by a canary's verdict, or after violations.

Every change is noted in the audit log, in the router's log and among the events.
"""

from __future__ import annotations

import logging
from typing import Any, Protocol

from router.base import Conflict
from router.rollout.audit_log import AuditLog
from router.rollout.canary import Canary, CanaryRules
from router.rollout.catalog import Catalog
from router.rollout.revisions import Revision, Revisions, no_canary
from router.strategy import Bound, Strategy
from router.supervision import ViolationKind
from router.telemetry import Events, Metrics, Receipt

__all__ = ["FALLBACK", "ITSELF", "Decisions", "Rollout"]

log = logging.getLogger(__name__)
ITSELF = "router"
# Errors that are the request's own fault, under any strategy.
CLIENTS_OWN = frozenset({"bad_request", "too_large"})
FALLBACK = "data_parallel"


class Decisions(Protocol):
    """Where a router's own decisions are made: in its `Rollout`, or by all routers of a store."""

    def judged(self, number: int, *, failed: bool, ttft_ms: float | None) -> None:
        """A request of the canary `number` has ended; arguments as of `Canary.note`."""

    def dismiss(self, number: int, why: str) -> None:
        """Replace the revision `number` by the one before it, or by plain data parallelism."""


class Rollout:
    """Changes the active revision. Call its methods on the event loop; they do not wait.

    It is its own `decisions`, unless it is given others.
    """

    def __init__(
        self,
        catalog: Catalog,
        first: Bound,
        *,
        metrics: Metrics,
        events: Events,
        audit_log: AuditLog,
        strikes: int,
        shared: bool = False,
    ) -> None:
        """`shared`: another part of the router notes what it does, also that it has started."""
        self.revisions = Revisions(first, on_violation=self._violated)
        self.events = events
        self.audit_log = audit_log
        self.last_canary: dict[str, Any] | None = None
        self.decisions: Decisions = self
        self._catalog = catalog
        self._metrics = metrics
        self._strikes = strikes
        if not shared:
            self._note(ITSELF, "started", self.revisions.active)

    def activate(
        self,
        who: str,
        bound: Bound,
        *,
        if_generation: int | None = None,
        rules: CanaryRules | None = None,
    ) -> Revision:
        """Make `bound` active for new requests, or a canary. Raises `Conflict`."""
        revisions = self.revisions
        if rules is not None:
            revision = revisions.try_out(bound, Canary(rules), if_generation=if_generation)
            self._note(who, "canary", revision)
            self._publish_canary(revision, "begun", "")
            return revision
        revisions.check(if_generation)
        self._drop_canary(f"{who} activates another generation")
        revision = revisions.activate(bound)
        self._swapped(who, "activate", revision)
        return revision

    def promote(self, who: str, number: int, why: str = "") -> Revision:
        """Make the canary `number` the active revision. Raises `Conflict` if it is none."""
        canary, candidate = self.revisions.canary, self.revisions.candidate
        if canary is None or candidate is None or candidate.number != number:
            raise no_canary(number)
        why = why or f"{who} promotes it"
        revision = self.revisions.promote()
        self._swapped(who, "promote", revision, why)
        self._publish_canary(revision, "promoted", why, canary)
        return revision

    def rollback(self, who: str, why: str = "") -> Revision:
        """End the canary if there is one, else go back to what was active before.

        Returns the revision that is active then. Raises `Conflict`.
        """
        if self._drop_canary(why or f"{who} rolls back"):
            return self.revisions.active
        revision = self.revisions.rollback()
        self._swapped(who, "rollback", revision, why)
        return revision

    def loaded(self, who: str, strategy: Strategy) -> None:
        """Note that a strategy was loaded and is listed."""
        digest = strategy.source_sha256
        self.audit_log.note(who, "load", name=strategy.name, source_sha256=digest)
        self.told_of_load(who, strategy)

    def told_of_load(self, who: str, strategy: Strategy) -> None:
        """Publish and log that a strategy was loaded."""
        digest = strategy.source_sha256
        self.events.publish("load", who=who, name=strategy.name, source_sha256=digest)
        log.info("%s loaded strategy %s", who, strategy.name)

    def begun(self, revision: Revision, receipt: Receipt) -> None:
        """Note that a request of `revision` begins."""
        self.events.publish(
            "request_begun",
            id=receipt.id,
            generation=revision.number,
            strategy=receipt.strategy,
            prompt_tokens=receipt.prompt_tokens,
        )

    def ended(self, revision: Revision, receipt: Receipt) -> None:
        """Note that it has ended; a canary is judged by it."""
        self.events.publish(
            "request_ended",
            id=receipt.id,
            generation=revision.number,
            strategy=receipt.strategy,
            status=receipt.status,
            error=receipt.error,
            ms=receipt.ms,
            first_token_ms=receipt.first_token_ms,
            completion_tokens=receipt.completion_tokens,
        )
        if revision is self.revisions.candidate:
            self._judge(revision, receipt)

    def tell_swap(self, who: str, what: str, why: str) -> None:
        """Publish that the active revision has become it."""
        active = self.revisions.active
        self.events.publish("swap", who=who, what=what, why=why, **active.describe())

    def tell_canary(self, name: str, told: dict[str, Any], *, counted: bool) -> None:
        """Publish that a canary has begun or was decided. `counted`: by this router."""
        if counted:
            self._metrics.canaries.labels(told["decision"]).inc()
        self.events.publish("canary", name=name, **told)

    def judged(self, number: int, *, failed: bool, ttft_ms: float | None) -> None:
        """Promote or drop the canary once there is a verdict."""
        canary = self.revisions.canary
        if canary is None or (verdict := canary.note(failed=failed, ttft_ms=ttft_ms)) is None:
            return
        if verdict.decision == "rolled_back":
            self._drop_canary(verdict.why)
        else:
            self.promote(ITSELF, number, verdict.why)

    def dismiss(self, number: int, why: str) -> None:
        """Replace a revision by the one before it, or by plain data parallelism."""
        revisions = self.revisions
        if revisions.candidate is not None and revisions.candidate.number == number:
            self._drop_canary(why)
        if revisions.active.number != number:
            return
        # `rollback` would end a canary only, and this revision would stay.
        self._drop_canary(f"{revisions.active.label} is dismissed: {why}")
        try:
            self.rollback(ITSELF, why)
        except Conflict:
            fallback = revisions.activate(self._catalog[FALLBACK].bind({}))
            self._swapped(ITSELF, "fallback", fallback, why)

    def _judge(self, revision: Revision, receipt: Receipt) -> None:
        canary = self.revisions.canary
        if canary is None:
            return
        failed, ttft_ms = receipt.status == "failed", receipt.first_token_ms
        if failed and receipt.error and receipt.error["type"] in CLIENTS_OWN:
            return
        if ttft_ms is None and not failed:
            ttft_ms = receipt.ms
            limit = canary.rules.max_ttft_p99_ms
            if limit is None or ttft_ms is None or ttft_ms <= limit:
                return  # the client has left early, which says nothing about the canary
        self.decisions.judged(revision.number, failed=failed, ttft_ms=ttft_ms)

    def _drop_canary(self, why: str) -> bool:
        canary, revision = self.revisions.canary, self.revisions.drop()
        if revision is None:
            return False
        self._note(ITSELF, "canary_rolled_back", revision, why)
        self._publish_canary(revision, "rolled_back", why, canary)
        return True

    def _violated(self, revision: Revision, kind: ViolationKind, message: str) -> None:
        name = revision.bound.strategy.name
        log.warning("%s: %s [%s]", revision.label, message, kind)
        self._metrics.violations.labels(name, revision.number, kind).inc()
        self.events.publish(
            "offence", generation=revision.number, strategy=name, kind=kind, message=message
        )
        if kind == "blocked" and revision.violations[kind] >= self._strikes:
            why = f"it held up the event loop {self._strikes} times"
            self.decisions.dismiss(revision.number, why)

    def _swapped(self, who: str, what: str, revision: Revision, why: str = "") -> None:
        self._note(who, what, revision, why)
        self.tell_swap(who, what, why)

    def _publish_canary(
        self, revision: Revision, decision: str, why: str, canary: Canary | None = None
    ) -> None:
        account = canary.describe() if canary is not None else {}
        fields = {"generation": revision.number, "decision": decision, "why": why, **account}
        if decision != "begun":
            self.last_canary = fields
        self.tell_canary(revision.bound.strategy.name, fields, counted=True)

    def _note(self, who: str, what: str, revision: Revision, why: str = "") -> None:
        strategy = revision.bound.strategy
        self.audit_log.note(
            who,
            what,
            name=strategy.name,
            params=revision.bound.shown,
            source_sha256=strategy.source_sha256,
            generation=revision.number,
            **({"why": why} if why else {}),
        )
        level = logging.WARNING if who == ITSELF and what != "started" else logging.INFO
        log.log(level, "%s: %s %s: %s", who, what, revision.label, why)
