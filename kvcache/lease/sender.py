"""The sender's side: from an address to a claimed lease, and what is put there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any, Protocol

from kvcache.errors import BadAddress, BadRange, Internal, MicroserveError, StaleEpoch
from kvcache.lease.address import KVAddress, prompt_digest
from kvcache.lease.identity import Identity
from kvcache.lease.put import Put
from kvcache.pages.page_manager import PageManager
from kvcache.sequences.step import PagedSequence
from kvcache.types import PageId

__all__ = ["Mirror", "PutOpener", "Sender"]


class PutOpener(Protocol):
    """What opens puts: a transport."""

    def open(self, address: KVAddress, begin: int) -> Put:
        """Claim the lease and start a put at `begin`. See `Transport.open`."""
        ...


class Mirror:
    """The KV of one sequence, kept up to date in a lease on another engine (DéjàVu's token
    streaming). The cache's lock guards it.

    One write is under way at a time: all layers of what is new, then the watermark. Its pages are
    held until it has drained, whatever becomes of the sequence.
    """

    def __init__(self, address: KVAddress) -> None:
        self.address = address
        self.begin = address.begin  # the first position that is sent
        self.landed = address.begin  # tokens whose KV is known to be there
        self.sent = address.begin  # tokens whose KV is there or under way
        self.put: Put | None = None
        self.held: list[PageId] = []  # what the write under way reads
        self.failure: MicroserveError | None = None
        self.closed = False

    @property
    def room(self) -> int:
        """Tokens that the lease has room for."""
        return self.address.room

    def renew(self) -> None:
        """Show the receiver that the sender lives."""
        if self.put is not None and not self.closed:
            self.put.renew()


class Sender:
    """The puts and mirrors of one cache."""

    def __init__(
        self,
        manager: PageManager,
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

    def mirror(self, kv_addr: str, tokens: Sequence[int]) -> Mirror:
        """See `KVCache.open_mirror`."""
        mirror = Mirror(self.check(kv_addr, tokens))
        mirror.put = self._claim(mirror.address, mirror.begin)
        return mirror

    def extend(self, mirror: Mirror, kv_addr: str) -> None:
        """See `KVCache.extend_mirror`."""
        address = KVAddress.verify(kv_addr, self._identity.secret)
        if (address.lease_id, address.nonce) != (mirror.address.lease_id, mirror.address.nonce):
            raise BadAddress("kv_addr is for another lease", param="kv_addr")
        with self._lock:
            put, mirror.put = mirror.put, None  # nothing is written meanwhile
        if put is None:
            raise Internal("the mirror is being extended already")
        put.close().result()  # at most what was under way: the new claim begins at the watermark
        claimed = self._claim(address, mirror.sent)
        with self._lock:
            mirror.address, mirror.put = address, claimed
            if mirror.closed:
                claimed.close()

    def advance(self, mirror: Mirror, sequence: PagedSequence, every: int) -> None:
        """See `KVCache.mirror`."""
        end = min(sequence.length, mirror.room)
        due = max(min(mirror.sent + every, mirror.room), mirror.sent + 1)
        if end < due or mirror.put is None or mirror in self._writing:
            return
        if mirror.closed or mirror.failure is not None:
            return
        held = sequence.table.pages(mirror.sent // self._page_size, -(-end // self._page_size))
        mirror.held = self._manager.share(held)
        self._writing.add(mirror)
        mirror.put.write(self._layers, sequence.table.ids, mirror.sent, end)
        mirror.put.signal(end)
        mirror.sent = end
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
        """Every page that a mirror holds, for the proof of ownership."""
        for mirror in self._writing:
            yield mirror.held

    def _drained(self, mirror: Mirror, done: Future[None]) -> None:
        """A write is over, one way or the other. On the transport's thread."""
        error = done.exception()
        with self._lock:
            self._writing.discard(mirror)
            self._manager.drop(mirror.held)
            mirror.held = []
            if error is None and not mirror.closed:
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
