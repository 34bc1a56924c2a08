"""What a put writes into: all that is different from transport to transport."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvcache.memory.layout import KVLayout
from kvcache.transport.runs import Runs

__all__ = ["AtOnce", "Target"]


class Target(Protocol):
    """A peer's region as a sender sees it.

    Calls return when their work is complete, and come from one thread; but for `mark`.
    """

    @property
    def layout(self) -> KVLayout:
        """That of the peer's pool."""
        ...

    def try_right(self, slot: int, share: int = 0) -> bool:
        """Take the write right of a slot if nobody has it; never waits for who has.

        Alone, or together with all who give the same number for `share`.
        """
        ...

    def drop_right(self, slot: int) -> None:
        """Give it back: nothing of what was written under it is under way any more."""
        ...

    def words(self, slot: int) -> npt.NDArray[np.uint64]:
        """The slot's words as they are now."""
        ...

    def store(self, slot: int, words: Mapping[int, int]) -> None:
        """Write some of the slot's words, holding the right."""
        ...

    def mark(self) -> object:
        """Up to where the calling thread has started work on our pool's device, as an event on its
        stream; None where work is done when it has been started, as on CPUs."""
        ...

    def done(self, mark: object) -> bool:
        """Whether the work up to `mark` is done; never waits for it."""
        ...

    def copy(self, runs: Runs) -> None:
        """Copy runs of bytes from our pool into theirs, holding the right."""
        ...


class AtOnce:
    """That part of a `Target` whose pools are in the host's memory."""

    def mark(self) -> None:
        return None

    def done(self, mark: object) -> bool:
        return True
