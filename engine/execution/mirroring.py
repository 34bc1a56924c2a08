"""What a generation does about its mirror: a lease on another engine that its KV goes to as well.

    opening ──► running ──► ended      with its generation; nothing is said of it
       │           │
       └───────────┴──────► stopped    by an error, which the generation's events tell

The event loop opens it and asks for more room, the step loop moves it on, and the transport's
thread reports what has landed. None of them ever waits for another here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from engine.protocol import LeaseExpired, MicroserveError
from engine.scheduling.jobs import Generation, Job
from kvcache.cache import KVCache
from kvcache.lease.sender import Mirror
from kvcache.types import LeaseId, SeqId

__all__ = ["Mirroring", "StepMirrors"]

EXTEND_TOKENS = 128  # asked for at a time, at least


class Mirroring:
    """One generation's mirror; as a failure of the mirror, or its slowness, never is the stream's.

    (The microserving paper's put; DéjàVu's token streaming and replication.)
    """

    def __init__(
        self,
        cache: KVCache,
        lease_id: LeaseId,
        every: int,
        most: int,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """Sends `every` tokens at a time; the sequence never has more than `most`."""
        self.lease_id = lease_id
        self.stopped: MicroserveError | None = None
        self._cache = cache
        self._every = every
        self._most = most
        self._loop = loop
        self._call = asyncio.Event()  # set where the event loop has something to do
        self._mirror: Mirror | None = None
        self._ended = False
        self._asked = False  # for more room

    @property
    def landed(self) -> int:
        """Tokens whose KV is known to be in the lease, those that it had itself included."""
        return self._mirror.landed if self._mirror is not None else 0

    @property
    def sent(self) -> int:
        """Tokens whose KV went to the lease from here, and landed."""
        return self._mirror.landed - self._mirror.begin if self._mirror is not None else 0

    @property
    def over(self) -> bool:
        """Nothing further is sent."""
        return self._ended or self.stopped is not None

    # On the step loop's thread

    def advance(self, seq_id: SeqId) -> None:
        """Send what is new of the sequence, if it is enough."""
        mirror = self._mirror
        if mirror is None or self.over:
            return
        if mirror.failure is not None:
            self.stop(mirror.failure)
            return
        self._cache.mirror(seq_id, mirror, self._every)
        # Early enough that more room comes before it is needed, if the peer answers as it should.
        margin = max(4 * self._every, 4 * self._cache.layout.page_size)
        short = mirror.room < self._most and mirror.room - self._cache.length(seq_id) < margin
        if short and not self._asked:
            self._asked = True
            self._notify()

    def renew(self) -> None:
        """Show the lease's owner that we live, whether or not there is anything to send."""
        mirror = self._mirror
        if mirror is None or self.over:
            return
        if mirror.failure is not None:
            self.stop(mirror.failure)
        else:
            mirror.renew()

    # On any thread

    def end(self) -> None:
        """The generation is over, and with it the mirror. Idempotent."""
        self._ended = True
        self._close()

    def stop(self, failure: MicroserveError) -> None:
        """The mirror ends before its generation does. Idempotent."""
        if not self.over:
            self.stopped = failure
        self._close()

    # For the task that looks after it

    def open(self, kv_addr: str, tokens: list[int]) -> None:
        """Claim the lease. Waits; raises as `KVCache.open_mirror`."""
        self._mirror = self._cache.open_mirror(kv_addr, tokens)
        if self.over:  # meanwhile
            self._close()

    async def wants(self) -> int:
        """Tokens that more room is wanted for, once it is; 0 if the mirror is over."""
        while not self.over and not self._asked:
            self._call.clear()
            await self._call.wait()
        if self.over or self._mirror is None:
            return 0
        return min(max(EXTEND_TOKENS, 4 * self._every), self._most - self._mirror.room)

    def extend(self, kv_addr: str) -> None:
        """Go on with more room. Waits; raises as `KVCache.extend_mirror`."""
        if self._mirror is None:
            raise LeaseExpired("the mirror is not open")
        self._cache.extend_mirror(self._mirror, kv_addr)
        self._asked = False

    def _close(self) -> None:
        if self._mirror is not None:
            self._cache.close_mirror(self._mirror)
        self._notify()

    def _notify(self) -> None:
        self._loop.call_soon_threadsafe(self._call.set)


class StepMirrors:
    """The mirrored generations that the step loop has; used by its thread only."""

    def __init__(self) -> None:
        self._all: dict[Generation, Mirroring] = {}

    def add(self, generation: Generation) -> None:
        """Take on a generation, mirrored or not."""
        if generation.mirror is not None:
            self._all[generation] = generation.mirror

    def advance(self, jobs: Iterable[Job]) -> None:
        """These have computed something."""
        for job in jobs:
            if isinstance(job, Generation) and job in self._all:
                self._all[job].advance(job.seq_id)

    def renew(self) -> None:
        """Keep the leases of all, also of those that wait for their turn."""
        for generation, mirroring in list(self._all.items()):
            if mirroring.over:
                del self._all[generation]
            else:
                mirroring.renew()

    def end(self, generation: Generation) -> None:
        """A generation is over."""
        mirroring = self._all.pop(generation, None)
        if mirroring is not None:
            mirroring.end()
