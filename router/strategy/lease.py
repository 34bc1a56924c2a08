"""The lease on KV room that `prep_recv` gives, as strategies see it."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from router.base.ids import LeaseId
from router.engines.prefix_index import NOTHING, Expected

if TYPE_CHECKING:
    from router.legs.replica import Replica
    from router.strategy.engine import Engine

__all__ = ["Lease"]


@dataclass(eq=False, slots=True)
class Lease:
    """Room on `engine` for the KV of `prompt[match_len:end]`; `prompt[:match_len]` is there.

    `kv_addr` is opaque. A collapsed lease stands for no room at all: sender and receiver are one
    engine, so there is nothing to send, and `match_len` is `end`.
    """

    engine: Engine
    lease_id: LeaseId
    kv_addr: str
    match_len: int
    end: int
    consumed: bool = False  # a generation was started with it, or it was committed or released
    collapsed: bool = False
    replica: Replica | None = None  # it was a mirror's, and has what has landed
    expected: ExitStack = field(default_factory=ExitStack)  # the load of the stream to come
    coming: Expected = NOTHING  # what is to be cached there

    @property
    def open(self) -> bool:
        """Whether an engine holds room for it."""
        return not self.consumed and not self.collapsed

    def taken(self) -> None:
        """A generation has begun with it."""
        self.consumed = True
        if self.replica is not None:
            self.replica.forget()

    @classmethod
    def none(cls, engine: Engine, end: int) -> Lease:
        """A collapsed lease."""
        return cls(engine, LeaseId(""), "", end, end, collapsed=True)
