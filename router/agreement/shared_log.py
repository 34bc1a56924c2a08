"""The audit log that the routers of a store share."""

from __future__ import annotations

import logging
from collections import deque
from typing import Any

import orjson

from router.agreement.decoded import decoded
from router.agreement.truth import Activation, Truth
from router.base import StoreUnavailable
from router.rollout import ITSELF, AuditLog
from router.store import SharedStore

__all__ = ["SharedLog", "described", "encoded", "entries_of"]

log = logging.getLogger(__name__)

UNSAVED = 1000  # entries that wait for the store
MOST_ENTRY = 1 << 16  # bytes


class SharedLog:
    """Adds to the log of the store, and to this router's own. Without the store, entries wait."""

    def __init__(self, store: SharedStore, audit_log: AuditLog, name: str) -> None:
        """`name` is this router's."""
        self._store = store
        self._audit_log = audit_log
        self._name = name
        self._unsaved: deque[dict[str, Any]] = deque(maxlen=UNSAVED)

    async def note(self, who: str, what: str, **fields: Any) -> None:
        """Add an entry, to the store once it answers."""
        entry = AuditLog.entry(who, what, **fields, router=self._name)
        self._audit_log.add(entry)
        self._unsaved.append(entry)
        try:
            await self.save()
        except StoreUnavailable:
            log.info("an entry of the audit log waits for the store: %s", what)

    async def save(self) -> None:
        """Add what waits to the store. Raises `StoreUnavailable`."""
        while self._unsaved:
            entry = self._unsaved.popleft()
            try:
                await self._store.append(encoded(entry))
            except StoreUnavailable:
                self._unsaved.appendleft(entry)
                raise

    async def entries(self) -> list[dict[str, Any]]:
        """Return the newest entries of the store. Raises `StoreUnavailable`."""
        found = []
        for entry in await self._store.log():
            told = decoded(entry.value, dict[str, Any]) or {"what": "unreadable"}
            found.append({"number": entry.number, **told})
        return found


def entries_of(old: Truth, new: Truth, name: str) -> list[dict[str, Any]]:
    """Return the entries that tell how a truth became another one, by the router `name`."""
    entries, edit = [], new.edit
    if old.trial is not None and new.trial is None and edit.what != "promote":
        why = (new.last_trial or {}).get("why", "")
        told = described(old.trial.activation)
        entries.append(AuditLog.entry(ITSELF, "canary_rolled_back", **told, why=why))
    if edit.what != "canary_rolled_back":
        tried = new.trial if edit.what == "canary" else None
        one = tried.activation if tried is not None else new.active
        why_told = {"why": edit.why} if edit.why else {}
        entries.append(AuditLog.entry(edit.who, edit.what, **described(one), **why_told))
    return [{**entry, "router": name} for entry in entries]


def described(activation: Activation) -> dict[str, Any]:
    """Return what an entry says of an activation."""
    return {
        "name": activation.name,
        "params": activation.params,
        "source_sha256": activation.digest,
        "generation": activation.number,
    }


def encoded(entry: dict[str, Any]) -> bytes:
    """Encode an entry, without parameters that are too large to keep."""
    data = orjson.dumps(entry, option=orjson.OPT_NON_STR_KEYS)
    if len(data) <= MOST_ENTRY:
        return data
    return orjson.dumps({**entry, "params": "too large to keep"}, option=orjson.OPT_NON_STR_KEYS)
