"""The mirror of a generation: a lease on another engine that receives its KV as well.

    opening ──► running ──► ended      with its generation; not reported
       │           │
       └───────────┴──────► stopped    by an error, which the generation's events report

The event loop opens the mirror and requests more room, the step loop advances it, and the
transport's thread reports what has landed. None of them waits for another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from engine.protocol import LeaseExpired, MicroserveError
from kvcache.lease import Mirror
from kvcache.types import LeaseId, SeqId

__all__ = ["GenerationMirror", "MirrorCache"]

EXTEND_TOKENS = 128  # the least number of tokens per request for more room


class MirrorCache(Protocol):
    """The calls of `kvcache.cache.KVCache` that a mirror makes."""

    @property
    def page_size(self) -> int: ...
    def length(self, seq_id: SeqId) -> int: ...
    def open_mirror(self, kv_addr: str, tokens: Sequence[int]) -> Mirror: ...
    def mirror(self, seq_id: SeqId, mirror: Mirror, every: int) -> None: ...
    def extend_mirror(self, mirror: Mirror, kv_addr: str) -> None: ...
    def close_mirror(self, mirror: Mirror) -> None: ...


class GenerationMirror:
    """The mirror of one generation. Neither its failure nor its slowness affects the generation.

    It drives a `kvcache.lease.Mirror`, the writer of the lease. (The microserving paper's put;
    DéjàVu's token streaming and replication.)
    """

    def __init__(
        self,
        cache: MirrorCache,
        lease_id: LeaseId,
        every: int,
        most: int,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """Send `every` tokens at a time; the sequence never grows beyond `most` tokens."""
        self.lease_id = lease_id
        self.stopped: MicroserveError | None = None
        self._cache = cache
        self._every = every
        self._most = most
        self._loop = loop
        self._changed = asyncio.Event()  # set when `wait_for_extension` has to look again
        self._mirror: Mirror | None = None
        self._ended = False
        self._extending = False  # more room is needed and has not been granted yet

    @property
    def landed(self) -> int:
        """Tokens whose KV is known to be in the lease, including those it had from the start."""
        return self._mirror.landed if self._mirror is not None else 0

    @property
    def sent(self) -> int:
        """Tokens whose KV this engine has sent and that have landed."""
        return self._mirror.landed - self._mirror.begin if self._mirror is not None else 0

    @property
    def over(self) -> bool:
        """Whether the mirror sends nothing more."""
        return self._ended or self.stopped is not None

    # On the step loop's thread

    def advance(self, seq_id: SeqId) -> None:
        """Send the sequence's new KV if there is enough of it."""
        mirror = self._mirror
        if mirror is None or self.over:
            return
        if mirror.failure is not None:
            self.stop(mirror.failure)
            return
        self._cache.mirror(seq_id, mirror, self._every)
        # Early enough for a responsive peer to grant more room before it is needed.
        margin = max(4 * self._every, 4 * self._cache.page_size)
        short = mirror.room < self._most and mirror.room - self._cache.length(seq_id) < margin
        if short and not self._extending:
            self._extending = True
            self._notify()

    def renew(self) -> None:
        """Keep the peer's lease alive, whether or not there is anything to send."""
        mirror = self._mirror
        if mirror is None or self.over:
            return
        if mirror.failure is not None:
            self.stop(mirror.failure)
        else:
            mirror.renew()

    # On any thread

    def end(self) -> None:
        """End the mirror together with its generation. Idempotent."""
        self._ended = True
        self._close()

    def stop(self, failure: MicroserveError) -> None:
        """Stop the mirror before its generation ends. Idempotent."""
        if not self.over:
            self.stopped = failure
        self._close()

    # For the task that looks after the mirror

    def open(self, kv_addr: str, tokens: list[int]) -> None:
        """Claim the lease. Blocks; raises the errors of `KVCache.open_mirror`."""
        self._mirror = self._cache.open_mirror(kv_addr, tokens)
        if self.over:  # it ended while the lease was claimed
            self._close()

    async def wait_for_extension(self) -> int:
        """Wait until more room is needed; return how many tokens. 0 if the mirror is over."""
        while not self.over and not self._extending:
            self._changed.clear()
            await self._changed.wait()
        if self.over or self._mirror is None:
            return 0
        return min(max(EXTEND_TOKENS, 4 * self._every), self._most - self._mirror.room)

    def extend(self, kv_addr: str) -> None:
        """Continue with more room. Blocks; raises the errors of `KVCache.extend_mirror`."""
        if self._mirror is None:
            raise LeaseExpired("the mirror is not open")
        self._cache.extend_mirror(self._mirror, kv_addr)
        self._extending = False

    def _close(self) -> None:
        if self._mirror is not None:
            self._cache.close_mirror(self._mirror)
        self._notify()

    def _notify(self) -> None:
        self._loop.call_soon_threadsafe(self._changed.set)
