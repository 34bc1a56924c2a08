"""`Move`: a copy of several pages between the device and a tier."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from kvcache.types import PageId

__all__ = ["Move"]


@dataclass(slots=True, eq=False)
class Move:
    """A copy of device pages to slots (`out`) or back; it holds both until its end.

    `pages[first + i]` corresponds to `slots[i]`. At the end `finish`, called under the lock, takes
    over pages and slots, of which the first `done` are copied; its return value becomes the result
    of `ended`.
    """

    out: bool
    pages: list[PageId]
    slots: list[PageId]
    first: int
    finish: Callable[[Move], int]
    done: int = 0
    failed: bool = False
    wanted: bool = True  # if False, the move ends after the page that is being copied
    ended: Future[int] = field(default_factory=Future)
