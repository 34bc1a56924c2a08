"""A lease that an engine has granted to an attempt."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

from router.base import LeaseId
from router.engines import NOTHING, Backend, Expected
from router.legs.replica import Replica

__all__ = ["LeaseGrant"]


@dataclass(eq=False, slots=True)
class LeaseGrant:
    """Room on `backend` for the KV of `tokens[match_len:end]`; `tokens[:match_len]` is there.

    `kv_addr` is opaque. A collapsed grant holds no room: sender and receiver are one engine, so
    nothing needs to be sent, and `match_len` is `end`.
    """

    backend: Backend
    lease_id: LeaseId
    kv_addr: str
    match_len: int
    end: int
    consumed: bool = False  # a generation started with it, or it was committed or released
    collapsed: bool = False
    replica: Replica | None = None  # set if the lease is a replica's; it holds what has landed
    reserved_load: ExitStack = field(default_factory=ExitStack)  # of the generation to follow
    expected: Expected = NOTHING  # the pages that the lease will add to the prefix cache
    sent: int = 0  # senders say that they have sent `tokens[:sent]`
    on_sent: Callable[[], None] | None = None  # called when `sent` has grown

    @property
    def committed(self) -> bool:
        """Whether its KV is in the prefix cache there, so that there is no lease to take over."""
        return self.replica is not None and self.replica.committed

    @property
    def open(self) -> bool:
        """Whether an engine holds room for it."""
        return not self.consumed and not self.collapsed

    def note_sent(self, end: int) -> None:
        """Note that a sender says that it has sent the tokens up to `end`."""
        self.sent = max(self.sent, end)
        if self.on_sent is not None:
            self.on_sent()

    def taken(self) -> None:
        """A generation has started with it and owns its pages now."""
        self.consumed = True
        if self.replica is not None:
            self.replica.forget()

    @classmethod
    def none(cls, backend: Backend, end: int) -> LeaseGrant:
        """Return a collapsed grant."""
        return cls(backend, LeaseId(""), "", end, end, collapsed=True)
