"""The changes that an administrator makes, in one router or in all routers of a store."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from router.rollout.canary import CanaryRules
from router.rollout.revisions import Revision
from router.rollout.rollout import Rollout
from router.strategy import Bound, Strategy

__all__ = ["Changed", "Changes", "LocalChanges", "Wanted"]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What shall run: with `rules` as a canary; with `if_generation` only if that one is active."""

    bound: Bound
    if_generation: int | None = None
    rules: CanaryRules | None = None


@dataclass(frozen=True, slots=True)
class Changed:
    """A change that was made. `pending`: the routers that do not run it yet, or cannot."""

    revision: Revision
    pending: list[str] = field(default_factory=list)


class Changes(Protocol):
    """Changes of what runs, and the log of them.

    All of them raise `StoreUnavailable` if routers share a store and it does not answer.
    """

    async def activate(self, who: str, wanted: Wanted) -> Changed:
        """Make it active for new requests, or a canary. Raises `Conflict`."""

    async def promote(self, who: str, number: int) -> Changed:
        """Activate the canary `number` before its verdict. Raises `Conflict` if it is none."""

    async def rollback(self, who: str) -> Changed:
        """End the canary if there is one, else go back. Raises `Conflict`."""

    @property
    def can_roll_back(self) -> bool:
        """Whether there is a canary to end, or a generation to go back to."""

    async def loaded(self, who: str, strategy: Strategy) -> None:
        """Note that a strategy was loaded and is listed, and list it elsewhere."""

    async def note(self, who: str, what: str, **fields: Any) -> None:
        """Add an entry to the audit log."""

    async def entries(self) -> list[dict[str, Any]]:
        """Return the newest entries of the audit log, oldest first."""

    def store(self) -> dict[str, Any] | None:
        """Return the state of the store for `/health`; `None`: there is none."""

    @property
    def stale(self) -> bool:
        """Whether a request must wait for `confirm` before it takes the active revision."""

    async def confirm(self) -> None:
        """Wait until it is known which revision is active, or that this cannot be known."""


class LocalChanges:
    """Implements `Changes` for a router that shares nothing."""

    def __init__(self, rollout: Rollout) -> None:
        self._rollout = rollout

    async def activate(self, who: str, wanted: Wanted) -> Changed:
        revision = self._rollout.activate(
            who, wanted.bound, if_generation=wanted.if_generation, rules=wanted.rules
        )
        return Changed(revision)

    async def promote(self, who: str, number: int) -> Changed:
        return Changed(self._rollout.promote(who, number))

    async def rollback(self, who: str) -> Changed:
        return Changed(self._rollout.rollback(who))

    @property
    def can_roll_back(self) -> bool:
        revisions = self._rollout.revisions
        return revisions.candidate is not None or revisions.active.before is not None

    async def loaded(self, who: str, strategy: Strategy) -> None:
        self._rollout.loaded(who, strategy)

    async def note(self, who: str, what: str, **fields: Any) -> None:
        self._rollout.audit_log.note(who, what, **fields)

    async def entries(self) -> list[dict[str, Any]]:
        return self._rollout.audit_log.entries()

    def store(self) -> dict[str, Any] | None:
        return None

    @property
    def stale(self) -> bool:
        return False

    async def confirm(self) -> None:
        """Do nothing."""
