"""Virtual time: an event loop whose clock jumps to the next timer once nothing else is left."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Mapping
from typing import Any

__all__ = ["VirtualLoop"]

# Where only a far timer is left, threads and sockets, which live in real time, get so long.
FAR_S = 1.0
REAL_S = 0.05


class VirtualLoop(asyncio.SelectorEventLoop):
    """`time()` begins at 0. An hour of `asyncio.sleep` takes no time at all."""

    def __init__(self) -> None:
        self._clock = _JumpingSelector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


class _JumpingSelector(selectors.BaseSelector):
    """Where a selector would wait, this one lets the clock go on."""

    def __init__(self) -> None:
        self.now = 0.0
        self._real = selectors.DefaultSelector()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout <= 0:
            return self._real.select(timeout)
        ready = self._real.select(REAL_S if timeout > FAR_S else 0)
        if not ready:
            self.now += timeout
        return ready

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._real.unregister(fileobj)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._real.get_map()

    def close(self) -> None:
        self._real.close()
