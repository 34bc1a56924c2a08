"""A replica: the KV of a running generation, also kept in a lease on another engine.

x ──► (x+1) % N, over the engines that are up in the registry's order (DéjàVu, ring replication).
When x dies, the request continues at (x+1), from the last token whose KV has landed there.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from router.base import LeaseId
from router.engines import Backend
from router.legs.releaser import Releaser
from router.telemetry import Leg

__all__ = ["MirrorPlan", "Rank", "Replica", "Replicas"]

Rank = Callable[[Backend], Any]  # sort key


@dataclass(frozen=True, slots=True)
class MirrorPlan:
    """How a generation is mirrored: new KV is put every `every` tokens.

    The replica is on the next engine of the ring. With `rank`, it is on the engine with the lowest
    rank; ties go to the next of them in the ring.
    """

    every: int
    rank: Rank | None = None

    def ordered(self, engines: list[Backend]) -> list[Backend]:
        """Return engines of the ring in the order in which they are wanted."""
        return engines if self.rank is None else sorted(engines, key=self.rank)


class Replica:
    """A lease on `backend` into which `source` puts the KV of the generation of `leg`.

    Without a `lease_id` it is committed: `source` has put full pages into the prefix cache there,
    which may evict them. `landed` counts the tokens of prompt and output whose KV is known to be
    there. `lost` is called once, as soon as nothing can be resumed from the replica; `unwanted` is
    called when its engine is drained.
    """

    __slots__ = (
        "_lost", "_unwanted", "backend", "kv_addr", "landed", "lease_id", "leg", "over", "source",
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
        self._lost = lost
        self._unwanted = unwanted
        backend.replicas[self] = None
        source.mirrored[self] = None

    @property
    def committed(self) -> bool:
        """Whether it is in the prefix cache, and not in a lease."""
        return not self.lease_id

    @property
    def lag(self) -> int:
        """Tokens of the generation whose KV has not landed in the replica."""
        return max(0, self.leg.end + self.leg.tokens - self.landed)

    def lose(self, reason: str) -> None:
        """Note that the replica is gone, alone or with its engine."""
        if not self.over:
            lost = self._lost
            self.forget()
            lost(reason)

    def unwanted(self) -> None:
        """Ask for another replica in place of this one: its engine is being drained."""
        self._unwanted()

    def forget(self) -> None:
        """Nothing resumes from it any more: it is lost, taken over, or released. Idempotent."""
        self.over = True
        self._lost = self._unwanted = _nothing  # break the reference cycle with the callbacks
        self.backend.replicas.pop(self, None)
        self.source.mirrored.pop(self, None)


class Replicas:
    """The replicas of one choice, released when the `async with` body is left.

    They outlive the attempt that made them: the attempt may end because its engine died.
    """

    def __init__(self, releaser: Releaser, headers: Mapping[str, str]) -> None:
        self._releaser = releaser
        self._headers = headers
        self._all: list[Replica] = []
        self.numbers = itertools.count()  # for their request ids on the engines

    async def __aenter__(self) -> Replicas:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._all:
            await self.close()

    def add(self, replica: Replica) -> None:
        self._all.append(replica)

    def best(self) -> Replica | None:
        """Return the replica to resume from: of those on usable engines, the one with most KV."""
        usable = [r for r in self._all if not r.over and r.backend.usable]
        return max(usable, key=lambda replica: replica.landed, default=None)

    def end(self, replica: Replica) -> asyncio.Task[None] | None:
        """Release it. The engine is told in the task returned. Idempotent."""
        if replica in self._all:
            self._all.remove(replica)
        if replica.over:
            return None
        replica.forget()
        if replica.committed:
            return None
        body = {"lease_id": replica.lease_id}
        return self._releaser.spawn(replica.backend, body, self._headers)

    def settle(self) -> Replica | None:
        """End all but the best, and return that one."""
        best = self.best()
        for replica in list(self._all):
            if replica is not best:
                self.end(replica)
        return best

    async def close(self) -> None:
        """End all. Cancellation ends only the waiting."""
        # Begin all releases before waiting: waiting may be cancelled, beginning cannot.
        releases = [(replica.backend, self.end(replica)) for replica in list(self._all)]
        for backend, release in releases:
            if release is not None:
                await self._releaser.wait(backend, release)


def _nothing(*_: object) -> None:
    pass
