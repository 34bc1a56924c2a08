"""What the routers of a store agree on: which strategy is active, what was before, what is listed.

A `Truth` is the store's document. Its edits are functions from one truth to the next.
"""

from __future__ import annotations

import uuid
from datetime import UTC, datetime
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from engine.protocol import BadRequest
from router.agreement.decoded import decoded
from router.base import Conflict, StoreUnreadable
from router.rollout import CanaryRules, another_canary, check_generation, no_canary

__all__ = ["Activation", "Edit", "Listed", "Trial", "Truth"]

HISTORY = 64  # rollbacks in a row
MOST_LISTED = 256  # strategies that were loaded from source
# A document that was lost may have had changes that no router knows. Their numbers are left out.
LOST_NUMBERS = 1000
# Raised by a version that writes what an earlier one would misunderstand, or drop.
SCHEMA = 1


class Listed(Struct, frozen=True):
    """A strategy loaded from source: the SHA-256 of its source, and the name of its file."""

    digest: str
    file: str


class Activation(Struct, frozen=True):
    """An activation of a strategy. `source`: where its source is stored; `None`: it is installed.

    `digest` is the SHA-256 of its source, empty if it has none.
    """

    number: int
    name: str
    params: dict[str, Any]
    digest: str
    source: Listed | None = None


class Trial(Struct, frozen=True):
    """A canary."""

    activation: Activation
    rules: CanaryRules
    since: str


class Edit(Struct, frozen=True):
    """Who changed what, and why: the last one is part of the truth."""

    who: str
    what: str
    why: str = ""
    number: int = 0


class Truth(Struct, frozen=True):
    """The document. `id` is unique to each change; `last` is the last number that was given."""

    id: str
    last: int
    active: Activation
    before: list[Activation] = []  # newest first
    trial: Trial | None = None
    last_trial: dict[str, Any] | None = None
    listed: dict[str, Listed] = {}
    edit: Edit = Edit("router", "started")
    schema: int = SCHEMA

    @classmethod
    def first(cls, active: Activation) -> Truth:
        """Return the truth of a new store."""
        truth = cls(_id(), active.number, active, edit=Edit("router", "started", "", active.number))
        return truth if active.source is None else truth.with_listed({active.name: active.source})

    @classmethod
    def decode(cls, value: bytes) -> Truth:
        """Raises `StoreUnreadable` for what is no truth, or one of a later version."""
        written = decoded(value, _Schema)
        if written is not None and written.schema > SCHEMA:
            raise StoreUnreadable(
                f"a later version of microserve has written the store's document (schema "
                f"{written.schema}; this version knows {SCHEMA}): update this router"
            )
        if (truth := decoded(value, cls)) is None:
            raise StoreUnreadable(
                "the store's document is not one of microserve: delete it, and the routers put "
                "theirs back"
            )
        return truth

    def encode(self) -> bytes:
        return msgspec.json.encode(self)

    @property
    def digests(self) -> set[str]:
        """The sources that it needs."""
        activations = [self.active, *self.before]
        if self.trial is not None:
            activations.append(self.trial.activation)
        used = {one.source.digest for one in activations if one.source is not None}
        return used | {one.digest for one in self.listed.values()}

    def check(self, if_generation: int | None) -> None:
        """Raise `Conflict` if another generation is active."""
        check_generation(self.active.number, if_generation)

    def activate(
        self, who: str, wanted: Activation, what: str = "activate", why: str = ""
    ) -> Truth:
        """Activate it under the next number; a canary ends."""
        new = replace(wanted, number=self.last + 1)
        return replace(
            self.drop(who, why),
            id=_id(),
            last=new.number,
            active=new,
            before=[self.active, *self.before][:HISTORY],
            edit=Edit(who, what, why, new.number),
        )

    def try_out(self, who: str, wanted: Activation, rules: CanaryRules) -> Truth:
        """Make it a canary. Raises `Conflict` if there is one already."""
        if self.trial is not None:
            raise another_canary(self.trial.activation.number)
        new = replace(wanted, number=self.last + 1)
        since = datetime.now(UTC).isoformat(timespec="seconds")
        edit = Edit(who, "canary", "", new.number)
        trial = Trial(new, rules, since)
        return replace(self, id=_id(), last=new.number, trial=trial, edit=edit)

    def promote(self, number: int, why: str, account: dict[str, Any], who: str = "router") -> Truth:
        """Make the canary the active one. Raises `Conflict` if it has ended."""
        trial = self._trial(number)
        told = {"generation": number, "decision": "promoted", "why": why, **account}
        return replace(
            self,
            id=_id(),
            active=trial.activation,
            before=[self.active, *self.before][:HISTORY],
            trial=None,
            last_trial=told,
            edit=Edit(who, "promote", why, number),
        )

    def reject(self, number: int, why: str, account: dict[str, Any]) -> Truth:
        """End the canary. Raises `Conflict` if it has ended."""
        self._trial(number)
        return self.drop("router", why, account)

    def rollback(self, who: str, why: str = "") -> Truth:
        """End the canary, or else activate what was active before.

        Raises `Conflict` if nothing was.
        """
        if self.trial is not None:
            return self.drop(who, why or f"{who} rolls back")
        if not self.before:
            raise Conflict("there is no generation before this one")
        back = replace(self.before[0], number=self.last + 1)
        return replace(
            self,
            id=_id(),
            last=back.number,
            active=back,
            before=self.before[1:],
            edit=Edit(who, "rollback", why, back.number),
        )

    def drop(self, who: str, why: str, account: dict[str, Any] | None = None) -> Truth:
        """End the canary, if there is one."""
        if self.trial is None:
            return self
        number = self.trial.activation.number
        why = why or f"{who} activates another generation"
        told = {"generation": number, "decision": "rolled_back", "why": why, **(account or {})}
        edit = Edit("router", "canary_rolled_back", why, number)
        return replace(self, id=_id(), trial=None, last_trial=told, edit=edit)

    def listing(self, who: str, found: dict[str, Listed]) -> Truth:
        """List strategies that were loaded."""
        return replace(self.with_listed(found), edit=Edit(who, "load"))

    def with_listed(self, found: dict[str, Listed]) -> Truth:
        """Raises `BadRequest` if there are too many."""
        listed = {**self.listed, **found}
        if len(listed) > MOST_LISTED:
            raise BadRequest(f"more than {MOST_LISTED} strategies are loaded", param="name")
        return replace(self, id=_id(), listed=listed)

    def restored(self) -> Truth:
        """Return what a router puts back that finds the store without it."""
        return replace(self, id=_id(), last=self.last + LOST_NUMBERS)

    def _trial(self, number: int) -> Trial:
        if self.trial is None or self.trial.activation.number != number:
            raise no_canary(number)
        return self.trial


class _Schema(Struct):
    schema: int = SCHEMA


def _id() -> str:
    return uuid.uuid4().hex
