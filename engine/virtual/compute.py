"""How an engine's device is divided between its own steps and attention for debtors."""

from __future__ import annotations

from engine.latency import StepLatency
from kvcache.types import EngineId

__all__ = ["Compute"]


class Compute:
    """One engine's device, in virtual time.

    All that runs on it at a moment gets an equal share of it: the own steps, and each debtor whose
    step is under way. What is computed for debtors while the device would have been busy is owed:
    the own steps that follow take as much longer. Nothing is owed for idle time. So the device
    never computes more than a second in a second.
    """

    __slots__ = ("_at", "_busy", "_shares", "latency", "lent_s", "owed_s")

    def __init__(self, latency: StepLatency, now: float) -> None:
        self.latency = latency
        self.owed_s = 0.0  # computed for debtors, and not taken from own steps yet
        self.lent_s = 0.0  # computed for debtors, since the start
        self._shares: dict[EngineId, float] = {}  # of the time, by debtor whose step is under way
        self._busy = False
        self._at = now  # until when `owed_s` is right

    def run(self, now: float) -> None:
        """Own steps are under way from now on."""
        self._advance(now)
        self._busy = True

    def rest(self, now: float) -> None:
        """No own step is under way from now on."""
        self._advance(now)
        self._busy = False

    def parts(self, debtor: EngineId) -> int:
        """Return into how many parts the device is divided while it computes for a debtor."""
        return 1 + self._busy + len(self._shares) - (debtor in self._shares)

    def serve(self, debtor: EngineId, share: float, now: float) -> None:
        """A debtor's steps, under way from now on, need this share of the time."""
        self._advance(now)
        self._shares[debtor] = share

    def leave(self, debtor: EngineId, now: float) -> None:
        """A debtor's steps have ended."""
        self._advance(now)
        self._shares.pop(debtor, None)

    def take(self, steps: int, step_s: float) -> float:
        """Return by how much each of the next `steps` own steps, of `step_s` each, is longer.

        At most as much as the steps themselves, for each debtor that is served now.
        """
        extra = min(self.owed_s / steps, step_s * max(len(self._shares), 1))
        self.owed_s -= extra * steps
        return extra

    def put_back(self, seconds: float) -> None:
        """Some of what was taken is owed again: its steps were not computed."""
        self.owed_s += seconds

    def _advance(self, now: float) -> None:
        passed = now - self._at
        if passed <= 0:
            return
        self._at = now
        share = sum(self._shares.values())
        self.lent_s += share * passed
        self.owed_s = max(0.0, self.owed_s + (share - (not self._busy)) * passed)
