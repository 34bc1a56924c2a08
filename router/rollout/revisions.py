"""Which strategy runs: revisions, swapped atomically; a request keeps the one it began with.

A `Revision` is called a *generation* in the admin API, in receipts and in metrics.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from router.base import Conflict, RevisionNumber
from router.rollout.canary import Canary
from router.strategy import Bound
from router.supervision import ViolationKind

__all__ = [
    "OnViolation",
    "Revision",
    "Revisions",
    "another_canary",
    "check_generation",
    "no_canary",
]


@dataclass(eq=False, slots=True)
class Revision:
    """One activation of a strategy with parameters. `in_flight` counts its running requests."""

    number: RevisionNumber
    bound: Bound
    before: Revision | None = field(repr=False)  # what a rollback returns to
    on_violation: OnViolation = field(repr=False)
    in_flight: int = 0
    violations: Counter[ViolationKind] = field(default_factory=Counter)
    since: float = field(default_factory=time.time)  # when it was made here, s since the epoch
    states: dict[Any, Any] = field(default_factory=dict, repr=False)  # what its strategy remembers

    @property
    def label(self) -> str:
        """Its name in errors and logs."""
        return f"strategy {self.bound.strategy.name} (generation {self.number})"

    def add_violation(self, kind: ViolationKind, message: str) -> None:
        """Count a violation of its strategy."""
        self.violations[kind] += 1
        self.on_violation(self, kind, message)

    def describe(self) -> dict[str, Any]:
        return {
            "generation": self.number,
            "since": self.since,
            "name": self.bound.strategy.name,
            "params": self.bound.shown,
            "source_sha256": self.bound.strategy.source_sha256,
            "in_flight": self.in_flight,
            "offences": dict(self.violations),
        }


OnViolation = Callable[[Revision, ViolationKind, str], None]


def check_generation(active: int, wanted: int | None) -> None:
    """Raise `Conflict` if a number is wanted that is not the active one's."""
    if wanted is not None and wanted != active:
        raise Conflict(
            f"generation {active} is active, not {wanted}; `microserve strategy show` says what "
            "runs",
            param="if_generation",
        )


def another_canary(number: int) -> Conflict:
    """Return the error of a canary that begins while the canary `number` runs."""
    return Conflict(
        f"generation {number} is a canary, and there is one at a time: wait until it is judged, or "
        "end it with `microserve strategy rollback`"
    )


def no_canary(number: int) -> Conflict:
    """Return the error of a decision about a canary that has ended."""
    return Conflict(f"generation {number} is no canary any more", param="generation")


class Revisions:
    """The active revision, a canary beside it, and older ones that still have requests in flight.

    Numbers only grow, on a rollback too, so `if_generation` never meets an old number again. All
    methods run between two awaits of one event loop, so no lock is needed.
    """

    def __init__(
        self, first: Bound, *, history: int = 64, on_violation: OnViolation = lambda *_: None
    ) -> None:
        """`history` is how many rollbacks in a row are possible."""
        self._on_violation = on_violation
        self._last = RevisionNumber(1)
        self.active = Revision(self._last, first, None, on_violation)
        self.canary: Canary | None = None
        self.candidate: Revision | None = None  # the canary's
        self._history = history
        self._draining: dict[RevisionNumber, Revision] = {}

    def check(self, if_generation: int | None) -> None:
        """Raise `Conflict` if `if_generation` is given and is not the active one's number."""
        check_generation(self.active.number, if_generation)

    def activate(self, bound: Bound, *, if_generation: int | None = None) -> Revision:
        """Make `bound` active for new requests; a canary ends. Raises as `check`."""
        self.check(if_generation)
        self.drop()
        return self._swap(self._new(bound, before=self.active))

    def try_out(
        self, bound: Bound, canary: Canary, *, if_generation: int | None = None
    ) -> Revision:
        """Give `bound` the canary's share of new requests.

        Raises as `check`, and `Conflict` if there is a canary already.
        """
        self.check(if_generation)
        if self.candidate is not None:
            raise another_canary(self.candidate.number)
        self.canary, self.candidate = canary, self._new(bound, before=self.active)
        return self.candidate

    def promote(self) -> Revision:
        """Make the canary's revision the active one; it keeps its number."""
        if self.candidate is None:
            raise Conflict("there is no canary")
        candidate, self.candidate, self.canary = self.candidate, None, None
        return self._swap(candidate)

    def drop(self) -> Revision | None:
        """End the canary, if there is one, and return its revision; its requests go on."""
        candidate, self.candidate, self.canary = self.candidate, None, None
        if candidate is not None and candidate.in_flight:
            self._draining[candidate.number] = candidate
        return candidate

    def follow(
        self,
        number: RevisionNumber,
        bound: Bound | None,
        trial: tuple[RevisionNumber, Bound, Canary] | None,
    ) -> None:
        """Make that revision active, and that one the canary, as all routers of a store do.

        With `bound` `None` the active revision stays: this router cannot load the other one.
        """
        if number != self.active.number and bound is not None:
            if self.candidate is not None and self.candidate.number == number:
                self.promote()
            else:
                self._swap(self.made(number, bound))
        tried = self.candidate.number if self.candidate is not None else None
        if tried != (trial[0] if trial is not None else None):
            self.drop()
            if trial is not None:
                number, bound, self.canary = trial
                self.candidate = self.made(number, bound)

    def begin(self, number: RevisionNumber, bound: Bound) -> None:
        """Replace the first revision, before any request."""
        self.active = self.made(number, bound)

    def made(self, number: int, bound: Bound) -> Revision:
        """Return a revision whose number the store gives; a rollback does not go by it."""
        return Revision(RevisionNumber(number), bound, None, self._on_violation)

    def rollback(self) -> Revision:
        """Return to what ran before the active one, as a new revision; a canary ends.

        Raises `Conflict` if nothing was active before.
        """
        if (before := self.active.before) is None:
            raise Conflict("there is no generation before this one")
        self.drop()
        return self._swap(self._new(before.bound, before=before.before))

    def enter(self) -> Revision:
        """Return the revision of a new request; it is in use until `leave`."""
        revision = self.active
        if self.canary is not None and self.candidate is not None and self.canary.takes_next():
            revision = self.candidate
        revision.in_flight += 1
        return revision

    def leave(self, revision: Revision) -> None:
        """A request of `revision` has ended."""
        revision.in_flight -= 1
        if revision.in_flight == 0:
            self._draining.pop(revision.number, None)

    def live(self) -> list[Revision]:
        """Return the active revision, then a canary's, then older ones that are still in use."""
        trial = [self.candidate] if self.candidate is not None else []
        return [self.active, *trial, *reversed(self._draining.values())]

    def _new(self, bound: Bound, *, before: Revision | None) -> Revision:
        self._last = RevisionNumber(self._last + 1)
        return Revision(self._last, bound, before, self._on_violation)

    def _swap(self, new: Revision) -> Revision:
        old, self.active = self.active, new
        if old.in_flight:
            self._draining[old.number] = old
        self._forget()
        return new

    def _forget(self) -> None:
        """Cut the chain of `before`s, which would otherwise grow with every swap."""
        revision: Revision | None = self.active
        for _ in range(self._history):
            if revision is None:
                return
            revision = revision.before
        if revision is not None:
            revision.before = None
