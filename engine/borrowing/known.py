"""The creditors that the router has named: whom to ask now, and whose blocks to offer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from engine.borrowing.settings import BorrowingSettings
from engine.protocol import Creditor
from kvcache.types import EngineId

__all__ = ["KnownCreditors"]


class KnownCreditors:
    """The list of the router, without this engine. Not thread-safe.

    A creditor that refuses rests for a while. One that failed in a step is offered again once it is
    trusted. From one that is frozen nothing is borrowed.
    """

    def __init__(
        self,
        own: EngineId,
        connected: Callable[[], Collection[EngineId]],
        clock: Callable[[], float],
        settings: BorrowingSettings,
    ) -> None:
        """`connected` returns the creditors whose attention can be asked for now."""
        self.listed: tuple[Creditor, ...] = ()
        self.failed: set[EngineId] = set()
        self.refusals = 0
        self._own, self._connected, self._clock, self._settings = own, connected, clock, settings
        self._rests: dict[EngineId, tuple[float, float]] = {}  # until when, and how long
        self._frozen: dict[str, tuple[EngineId, float]] = {}  # by order: whom, and until when

    def replace(self, creditors: Sequence[Creditor]) -> dict[str, int]:
        """Replace the list; return the epochs of its processes."""
        self.listed = tuple(each for each in creditors if each.instance != self._own)
        epochs = {each.instance: each.epoch for each in self.listed}
        listed = {EngineId(name) for name in epochs}
        self._rests = {name: rest for name, rest in self._rests.items() if name in listed}
        return epochs

    def candidates(self) -> list[Creditor]:
        """Return the creditors to be asked now, in order."""
        now = self._clock()
        left_out = self.failed | self._frozen_now()
        return [
            each
            for each in self.listed
            if self._rests.get(EngineId(each.instance), (0.0, 0.0))[0] <= now
            and each.instance not in left_out
        ]

    def offered(self) -> set[EngineId]:
        """Return the creditors whose free blocks can be taken now."""
        return set(self._connected()) - self.failed - self._frozen_now()

    def rest(self, creditor: EngineId, *, longer: bool) -> None:
        """Ask a creditor for nothing for a while; `longer`: twice as long as the last time."""
        _, before = self._rests.get(creditor, (0.0, 0.0))
        pause = min(2 * before, self._settings.longest_rest_s) if longer else 0.0
        pause = max(pause, self._settings.rest_s)
        self._rests[creditor] = self._clock() + pause, pause
        self.refusals += 1

    def lent(self, creditor: EngineId) -> None:
        """Note that a creditor has lent."""
        self._rests.pop(creditor, None)

    def freeze(self, order: str, creditor: EngineId, seconds: float) -> None:
        """Borrow nothing from a creditor for so long, or until `thaw` of the same order."""
        self._frozen[order] = creditor, self._clock() + seconds

    def thaw(self, order: str) -> None:
        """End what `freeze` began."""
        self._frozen.pop(order, None)

    def _frozen_now(self) -> set[EngineId]:
        now = self._clock()
        return {creditor for creditor, until in self._frozen.values() if until > now}
