"""A replica: the KV of a running generation, kept in a lease on another engine as well.

x ──► (x+1) % N, over the engines that are up in the registry's order (DéjàVu, ring replication).
When x dies, the request goes on at (x+1), from the last token whose KV has landed there.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from router.base.ids import LeaseId
from router.engines.backend import Backend
from router.legs.releaser import Releaser
from router.telemetry.receipts import Leg

if TYPE_CHECKING:
    from router.strategy.engine import Engine

__all__ = ["Mirror", "Replica", "Replicas"]


@dataclass(frozen=True, slots=True)
class Mirror:
    """That a generation has a replica, which gets what is new `every` so many tokens.

    It is on the next engine of the ring. With `key`, on the one for which `key(engine)` is least;
    of equals, on the next of them.
    """

    every: int = 16
    key: Callable[[Engine], Any] | None = None

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"every must be 1 or more, not {self.every}")


class Replica:
    """A lease on `backend` into which `source` puts the KV of the generation of `leg`.

    `landed`: tokens of prompt and output whose KV is known to be there. `lost` is called once, as
    soon as nothing can be resumed from it; `unwanted` when its engine is to be empty.
    """

    __slots__ = (
        "_lost",
        "backend",
        "kv_addr",
        "landed",
        "lease_id",
        "leg",
        "over",
        "source",
        "unwanted",
    )  # fmt: skip

    def __init__(
        self,
        backend: Backend,
        source: Backend,
        leg: Leg,
        *,
        lease_id: str,
        kv_addr: str,
        landed: int,
        lost: Callable[[str], None],
        unwanted: Callable[[], None],
    ) -> None:
        self.backend = backend
        self.source = source
        self.leg = leg
        self.lease_id = LeaseId(lease_id)
        self.kv_addr = kv_addr
        self.landed = landed
        self.over = False
        self.unwanted = unwanted
        self._lost = lost
        backend.replicas.add(self)
        source.mirrored.add(self)

    @property
    def lag(self) -> int:
        """Tokens that the generation has and the replica has not."""
        return max(0, self.leg.end + self.leg.tokens - self.landed)

    def lose(self, reason: str) -> None:
        """It is gone, with its engine or by itself."""
        if not self.over:
            lost = self._lost
            self.forget()
            lost(reason)

    def forget(self) -> None:
        """Nobody resumes from it any more: it is lost, taken over, or released. Idempotent."""
        self.over = True
        self._lost = self.unwanted = _nothing  # they know us: nothing here is for the collector
        self.backend.replicas.discard(self)
        self.source.mirrored.discard(self)


class Replicas:
    """The replicas of one choice. They outlive the attempt that made them, which may end because
    its engine has died, but not the choice: `close`."""

    def __init__(self, releaser: Releaser, headers: Mapping[str, str]) -> None:
        self._releaser = releaser
        self._headers = headers
        self._all: list[Replica] = []
        self.numbers = itertools.count()  # names of their own on the engines

    def __bool__(self) -> bool:
        return bool(self._all)

    def add(self, replica: Replica) -> None:
        self._all.append(replica)

    def best(self) -> Replica | None:
        """The one to resume from: that with the most, on an engine that takes new work."""
        usable = [r for r in self._all if not r.over and r.backend.usable]
        return max(usable, key=lambda replica: replica.landed, default=None)

    def end(self, replica: Replica) -> asyncio.Task[None] | None:
        """Give it back to its engine, which learns of it in the task returned. Idempotent."""
        if replica in self._all:
            self._all.remove(replica)
        if replica.over:
            return None
        replica.forget()
        body = {"lease_id": replica.lease_id}
        return self._releaser.spawn(replica.backend, body, self._headers)

    def settle(self) -> Replica | None:
        """End all but the best, which is returned."""
        best = self.best()
        for replica in list(self._all):
            if replica is not best:
                self.end(replica)
        return best

    async def close(self) -> None:
        """End all. Cancellation ends the waiting only."""
        # First begin all releases, then wait: waiting may be cancelled, beginning cannot.
        releases = [(replica.backend, self.end(replica)) for replica in list(self._all)]
        for backend, release in releases:
            if release is not None:
                await self._releaser.wait(backend, release)


def _nothing(*_: object) -> None:
    pass
