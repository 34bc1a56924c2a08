"""Feeds a ledger with the heartbeats in the states that engines report when they are polled."""

from __future__ import annotations

from collections.abc import Callable

from engine.protocol import BadRequest, EngineState, Heartbeat, MicroserveError
from router.base import EngineId
from router.ledger.ledger import Ledger

__all__ = ["Heartbeats"]


class Heartbeats:
    """Enters and removes rows of a ledger, as engines answer and are lost."""

    def __init__(self, ledger: Ledger, changed: Callable[[Heartbeat], object]) -> None:
        """`changed` is called with a heartbeat whose debts differ from those of the one before."""
        self._ledger = ledger
        self._changed = changed
        self._latest: dict[EngineId, Heartbeat] = {}

    def heard(self, state: EngineState, before: EngineState | None) -> str:
        """Enter the heartbeat of a state, if it has one.

        `before` is the state that the same address reported before. If that was another process,
        its row goes first, whatever the order of their epochs. Return why the heartbeat is refused;
        empty if it is not.
        """
        same = before is not None and (before.engine_id, before.epoch) == (
            state.engine_id,
            state.epoch,
        )
        if not same:
            self.lost(before)
        heartbeat = state.heartbeat
        if heartbeat is None:
            return ""
        try:
            self._enter(heartbeat, state)
        except MicroserveError as error:
            return f"its heartbeat is refused: {error.message}"
        return ""

    def lost(self, state: EngineState | None) -> None:
        """Remove the row of an engine whose latest state is `state`, if there is one."""
        if state is None or state.heartbeat is None:
            return
        instance = EngineId(state.engine_id)
        latest = self._latest.get(instance)
        if latest is not None and latest.epoch == state.epoch:  # else another one has this name
            del self._latest[instance]
            self._ledger.remove(instance)

    def _enter(self, heartbeat: Heartbeat, state: EngineState) -> None:
        """Raise `BadRequest` for a heartbeat of another engine, and what `Ledger.record` raises."""
        if (heartbeat.instance, heartbeat.epoch) != (state.engine_id, state.epoch):
            raise BadRequest(f"{state.engine_id} speaks for another process", param="heartbeat")
        if not self._ledger.record(heartbeat):
            return
        instance = EngineId(heartbeat.instance)
        latest, self._latest[instance] = self._latest.get(instance), heartbeat
        debts = (latest.lent, latest.borrowed) if latest is not None else ({}, {})
        if (heartbeat.lent, heartbeat.borrowed) != debts:
            self._changed(heartbeat)
