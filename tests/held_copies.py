"""Holds up the copies of puts in this process, over the memory and shared memory transports."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from kvcache.transport.mapped import MappedTarget
from kvcache.transport.runs import Runs

__all__ = ["HeldCopies", "held_copies"]

PATIENCE_S = 60.0


class HeldCopies:
    """Copies that wait at their beginning, under the write right of their lease."""

    def __init__(self) -> None:
        self.reached = threading.Event()  # a copy waits
        self._opened = threading.Event()

    def let_go(self) -> None:
        """Let them, and later ones, go on."""
        self._opened.set()

    def wait(self) -> None:
        self.reached.set()
        assert self._opened.wait(PATIENCE_S)


@contextmanager
def held_copies() -> Iterator[HeldCopies]:
    """Hold up all copies until `let_go`, at the latest until the end of the block."""
    held, copy = HeldCopies(), MappedTarget.copy

    def held_up(self: MappedTarget, runs: Runs) -> None:
        held.wait()
        copy(self, runs)

    with mock.patch.object(MappedTarget, "copy", held_up):
        try:
            yield held
        finally:
            held.let_go()
