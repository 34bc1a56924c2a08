"""Whole pages sent into a lease or a landing of a peer: lent pages whose debtor wants them home."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any

from kvcache.errors import BadRange
from kvcache.lease.put import Put
from kvcache.lease.receiver import LeasablePages
from kvcache.lease.sender import Sender
from kvcache.types import PageId, TokenPos

__all__ = ["PageSends", "Target"]


class Target:
    """The claim of an address, from position 0 on."""

    def __init__(self, put: Put, room: int) -> None:
        self.put = put
        self.room = room  # tokens

    @property
    def bytes_sent(self) -> int:
        """Bytes that have been written."""
        return self.put.bytes_sent

    def abandon(self) -> None:
        """Write nothing further. Has no effect after the last write."""
        self.put.cancel()
        self.put.close()


class PageSends:
    """Sends pages of one cache. A page that is being sent is held until nothing reads it."""

    def __init__(
        self,
        sender: Sender,
        manager: LeasablePages,
        page_size: int,
        layers: int,
        lock: AbstractContextManager[Any],
    ) -> None:
        """`layers` are those that the cache holds; `lock` is the cache's."""
        self._sender = sender
        self._manager = manager
        self._page_size = page_size
        self._layers = range(layers)
        self._lock = lock
        self._held: dict[int, list[PageId]] = {}  # of sends in flight, by number
        self._sent = 0

    def open(self, kv_addr: str) -> Target:
        """Claim an address that is for no prompt. Waits and raises as `KVCache.open_put`."""
        return Target(*self._sender.claim(kv_addr))

    def send(self, target: Target, pages: Sequence[PageId]) -> Future[None]:
        """Send `pages` to the positions from 0 on, then raise the watermark.

        The caller holds the lock. The result is there when no work remains; it carries the failure
        of the put. Raises `BadRange` if there is no room for so many pages.
        """
        end, put = TokenPos(len(pages) * self._page_size), target.put
        if not 0 < end <= target.room:
            raise BadRange(f"the address has room for {target.room} tokens, not {end}",
                           param="kv_addr")  # fmt: skip
        self._sent += 1
        number = self._sent
        self._held[number] = self._manager.share(pages)
        try:
            put.write(self._layers, self._held[number], TokenPos(0), end)
            put.signal(end)
        finally:
            done = put.close()  # also after a failure: a part of the write may be in flight
            done.add_done_callback(lambda _: self._drained(number))
        return done

    def holders(self) -> Iterator[Sequence[PageId]]:
        """Yield the pages that are being sent, to prove ownership."""
        yield from self._held.values()

    def _drained(self, number: int) -> None:
        """Release the pages of a send. Runs on the transport's thread."""
        with self._lock:
            self._manager.drop(self._held.pop(number))
