"""One pinned prefix: what is wanted of it, and what the engines have."""

from __future__ import annotations

import asyncio
import math
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from engine.protocol import PageName
from router.base import EngineId, Pauses
from router.engines import Backend

__all__ = ["Copy", "Pin", "State", "shared_tokens"]

State = Literal["pinned", "copying", "waiting for room", "waiting for an engine", "unpinning"]
RETRY_S, LONGEST_RETRY_S = 0.5, 30.0  # pauses after failures


@dataclass(slots=True)
class Copy:
    """What one process of an engine has pinned of a prefix; 0 tokens: perhaps something."""

    epoch: int
    tokens: int = 0


@dataclass(slots=True, eq=False)
class Pin:
    """A prefix of full pages, to be kept on `wanted` engines, those in `engines` among them.

    `placed` has the engines that may have pinned some of it.
    """

    id: PageName  # of the last page, so of all tokens
    tokens: array[int]
    fingerprint: str  # of the engines' KV
    preview: str  # the beginning of its text
    copies: int = 0  # wanted in all
    engines: dict[EngineId, None] = field(default_factory=dict)  # on which copies are wanted
    placed: dict[Backend, Copy] = field(default_factory=dict)
    state: State = "copying"
    since: float = field(default_factory=time.time)  # of `state`
    error: str = ""  # of the last attempt at what is missing
    # Its work
    task: asyncio.Task[bool] | None = None
    target: Backend | None = None  # where the task makes a copy
    pauses: Pauses = field(default_factory=lambda: Pauses(RETRY_S, LONGEST_RETRY_S))
    due: float = -math.inf  # loop time of the next look at it
    check_at: float = -math.inf  # loop time; then engines are asked whether they still have it
    told: tuple[Any, ...] = ()  # by the last event

    @property
    def wanted(self) -> int:
        """The number of copies."""
        return max(self.copies, len(self.engines))

    def complete(self, backend: Backend) -> bool:
        """Whether all of it is pinned there, by a process that has not gone since."""
        copy = self.placed.get(backend)
        return (
            copy is not None
            and copy.tokens == len(self.tokens)
            and backend.status in ("up", "suspect")
            and backend.state is not None
            and backend.state.epoch == copy.epoch
        )

    def present(self) -> list[EngineId]:
        """Return the ids of the engines that have all of it pinned."""
        return sorted(backend.id for backend in self.placed if self.complete(backend))

    def describe(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "prefix": self.preview,
            "tokens": len(self.tokens),
            "copies": self.wanted,
            "engines": list(self.engines),
            "present": self.present(),
            "state": self.state,
            "since": self.since,
            "error": self.error or None,
        }


def shared_tokens(one: array[int], other: Sequence[int]) -> int:
    """Return the length of the longest common prefix. Takes O(log n) comparisons of bytes."""
    if not isinstance(other, array):
        other = array(one.typecode, other)
    mine, theirs = memoryview(one), memoryview(other)
    least, most = 0, min(len(mine), len(theirs))
    while least < most:
        middle = (least + most + 1) // 2
        if mine[:middle].tobytes() == theirs[:middle].tobytes():
            least = middle
        else:
            most = middle - 1
    return least
