"""The sending side: claims a lease by its address, and mirrors sequences into leases."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any, Protocol

from kvcache.errors import (
    BadAddress,
    BadRange,
    Internal,
    MicroserveError,
    StaleEpoch,
    Unsupported,
)
from kvcache.lease.address import KVAddress, prompt_digest
from kvcache.lease.identity import Identity
from kvcache.lease.put import Put
from kvcache.lease.receiver import LeasablePages
from kvcache.sequences import HOLE, PagedSequence
from kvcache.types import PageId, TokenPos

__all__ = ["Mirror", "PutOpener", "Sender"]

log = logging.getLogger(__name__)


class PutOpener(Protocol):
    """Opens puts. `Transport` implements it."""

    def open(self, address: KVAddress, begin: int) -> Put:
        """Claim the lease and start a put at `begin`. See `Transport.open`."""
        ...


class Mirror:
    """A replica of one sequence's KV in a lease on another engine (DéjàVu's token streaming).

    One write is in flight at a time: all layers of the new tokens, then the watermark. The mirror
    holds the pages of the write until it has drained, even if the sequence is removed. The cache's
    lock guards it.
    """

    def __init__(self, address: KVAddress) -> None:
        self.address = address
        self.begin = address.begin  # first position to send
        self.landed = address.begin  # tokens whose KV is known to have landed
        self.sent = TokenPos(address.begin)  # tokens whose KV has landed or is in flight
        self.put: Put | None = None
        self.held: list[PageId] = []  # pages of the write in flight
        self.failure: MicroserveError | None = None
        self.extending = False  # a new claim is being made: nothing is sent meanwhile
        self.closed = False

    @property
    def room(self) -> int:
        """Tokens for which the lease has room."""
        return self.address.room

    def renew(self) -> None:
        """Show the receiver that this sender is alive."""
        if self.put is not None and not self.closed and not self.extending:
            self.put.renew()


class Sender:
    """The puts and mirrors of one cache."""

    def __init__(
        self,
        manager: LeasablePages,
        page_size: int,
        layers: int,
        opener: PutOpener,
        identity: Identity,
        lock: AbstractContextManager[Any],
    ) -> None:
        """`layers` are those that the cache holds; `lock` is the cache's."""
        self._manager = manager
        self._page_size = page_size
        self._layers = range(layers)
        self._opener = opener
        self._identity = identity
        self._lock = lock
        self._writing: set[Mirror] = set()

    def check(self, kv_addr: str, tokens: Sequence[int]) -> KVAddress:
        """See `KVCache.check_address`."""
        address = KVAddress.verify(kv_addr, self._identity.secret)
        if address.fingerprint != self._identity.fingerprint:
            raise BadAddress("kv_addr is for another layout or other weights", param="kv_addr")
        if address.end > len(tokens) or prompt_digest(tokens[: address.end]) != address.digest:
            raise BadAddress("kv_addr is for another prompt", param="prompt")
        return address

    def open(self, kv_addr: str, prompt: Sequence[int], begin: int, end: int) -> Put:
        """See `KVCache.open_put`."""
        address = self.check(kv_addr, prompt)
        if not address.begin <= begin < end <= address.end:
            raise BadRange(
                f"[{begin}, {end}) is not in the lease's [{address.begin}, {address.end})",
                param="begin",
            )
        return self._claim(address, begin)

    def claim(self, kv_addr: str) -> tuple[Put, int]:
        """Claim an address that is for no prompt, from position 0 on; return its room in tokens.

        Waits and raises as `KVCache.open_put`.
        """
        address = self.check(kv_addr, ())
        if address.begin:
            raise BadRange("the address does not begin at position 0", param="kv_addr")
        return self._claim(address, 0), address.room

    def mirror(self, kv_addr: str, tokens: Sequence[int]) -> Mirror:
        """See `KVCache.open_mirror`."""
        mirror = Mirror(self.check(kv_addr, tokens))
        mirror.put = self._claim(mirror.address, mirror.begin)
        return mirror

    def extend(self, mirror: Mirror, kv_addr: str) -> None:
        """See `KVCache.extend_mirror`."""
        self.pause(mirror, kv_addr).result()  # the new claim must begin at the watermark
        self.resume(mirror, kv_addr)

    def pause(self, mirror: Mirror, kv_addr: str) -> Future[None]:
        """Send nothing further until `resume`; the result is there when nothing is in flight.

        Raises as `KVCache.extend_mirror`. The mirror stays paused if what follows fails, because
        the old claim may be lost.
        """
        self._same_lease(mirror, kv_addr)
        with self._lock:
            put = mirror.put
            if put is None or mirror.extending:
                raise Internal("the mirror is being extended already")
            mirror.extending = True
        return put.close()

    def resume(self, mirror: Mirror, kv_addr: str) -> None:
        """Go on with the room of a new address of the same lease, after `pause`."""
        address = self._same_lease(mirror, kv_addr)
        with self._lock:
            closed = mirror.closed
        if closed:
            return
        claimed = self._claim(address, mirror.sent)
        with self._lock:
            mirror.address, mirror.put, mirror.extending = address, claimed, False
            if mirror.closed:
                claimed.close()

    def _same_lease(self, mirror: Mirror, kv_addr: str) -> KVAddress:
        address = KVAddress.verify(kv_addr, self._identity.secret)
        if (address.lease_id, address.nonce) != (mirror.address.lease_id, mirror.address.nonce):
            raise BadAddress("kv_addr is for another lease", param="kv_addr")
        return address

    def advance(self, mirror: Mirror, sequence: PagedSequence, every: int) -> None:
        """See `KVCache.mirror`."""
        end = TokenPos(min(sequence.length, mirror.room))
        due = max(min(mirror.sent + every, mirror.room), mirror.sent + 1)
        if end < due or mirror.put is None or mirror in self._writing:
            return
        if mirror.closed or mirror.extending or mirror.failure is not None:
            return
        held = sequence.table.pages(mirror.sent // self._page_size, -(-end // self._page_size))
        if sequence.elsewhere and HOLE in held:
            mirror.failure = Unsupported("blocks of the sequence are elsewhere")
            return
        mirror.held = self._manager.share(held)
        self._writing.add(mirror)
        try:
            mirror.put.write(self._layers, sequence.table.ids, mirror.sent, end)
            mirror.put.signal(end)
        except Exception as error:  # must not harm the step that advances the mirror
            log.exception("a mirror's write cannot be queued")
            mirror.failure = Internal(f"the put failed: {error}")
            mirror.put.cancel()
        else:
            mirror.sent = end
        # Also after a failure: a part of the write may be in flight.
        mirror.put.close().add_done_callback(lambda done: self._drained(mirror, done))

    def close(self, mirror: Mirror) -> None:
        """See `KVCache.close_mirror`."""
        if mirror.closed:
            return
        mirror.closed = True
        if mirror.put is not None:
            mirror.put.cancel()
            mirror.put.close()

    def holders(self) -> Iterator[Sequence[PageId]]:
        """Yield the pages that mirrors hold, to prove ownership."""
        for mirror in self._writing:
            yield mirror.held

    def _drained(self, mirror: Mirror, done: Future[None]) -> None:
        """Release the pages of a finished or failed write. Runs on the transport's thread."""
        error = done.exception()
        with self._lock:
            self._writing.discard(mirror)
            self._manager.drop(mirror.held)
            mirror.held = []
            if error is None and not mirror.closed and mirror.failure is None:
                mirror.landed = mirror.sent
            elif isinstance(error, MicroserveError):
                mirror.failure = error
            elif error is not None:
                mirror.failure = Internal(f"the put failed: {error}")

    def _claim(self, address: KVAddress, begin: int) -> Put:
        identity = self._identity
        if address.engine_id == identity.engine_id and address.epoch != identity.epoch:
            raise StaleEpoch("this engine was restarted since the address was made")
        return self._opener.open(address, begin)
