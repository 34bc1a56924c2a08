"""Tells the lead when the KV that a call waits for has landed, or its lease has ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvcache.lease import LANDED, NONCE

__all__ = ["Arrivals"]

POLL_S = 0.001


class _Wait(NamedTuple):
    lease_id: str
    slot: int
    nonce: int
    wanted: int


class Arrivals:
    """A thread that reads the watermarks of awaited leases. It sleeps while there are none."""

    def __init__(
        self, slots: npt.NDArray[np.uint64], note: Callable[[dict[str, Any]], None]
    ) -> None:
        """`slots` are the control words of `kvcache.lease.control_slots`."""
        self._slots = slots
        self._note = note
        self._waits: list[_Wait] = []
        self._change = threading.Condition()
        self._ended = False
        threading.Thread(target=self._run, name="arrivals", daemon=True).start()

    def watch(self, lease_id: str, slot: int, nonce: int, wanted: int) -> None:
        """Note `{"landed": lease_id}` once `wanted` tokens have landed or the lease has ended."""
        with self._change:
            self._waits.append(_Wait(lease_id, slot, nonce, wanted))
            self._change.notify()

    def close(self) -> None:
        """End the thread."""
        with self._change:
            self._ended = True
            self._change.notify()

    def _run(self) -> None:
        while True:
            with self._change:
                while not self._waits and not self._ended:
                    self._change.wait()
                if self._ended:
                    return
                due = [wait for wait in self._waits if self._is_due(wait)]
                self._waits = [wait for wait in self._waits if wait not in due]
            for wait in due:
                self._note({"landed": wait.lease_id})
            time.sleep(POLL_S)

    def _is_due(self, wait: _Wait) -> bool:
        words = self._slots[wait.slot]
        return int(words[NONCE]) != wait.nonce or int(words[LANDED]) >= wait.wanted
