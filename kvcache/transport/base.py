"""What a transport is: a way to reach a peer's pool, and one writer of one lease there."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

from kvcache.address import KVAddress
from kvcache.region import Region
from kvcache.types import PageId

__all__ = ["Put", "Transport"]


class Put(Protocol):
    """The one-sided put with signal: writes into one receive lease of a peer.

    Calls return at once; the work is done in the order of the calls, beside the caller's own. The
    first failure is kept, what follows is skipped, and `close` tells.
    """

    bytes_sent: int

    def write(self, layers: range, pages: Sequence[PageId], begin: int, end: int) -> None:
        """Put positions `[begin, end)` of `layers`; `pages` are the sender's, from position 0."""
        ...

    def signal(self, landed: int) -> None:
        """Raise the receiver's watermark to `landed` once all writes so far are complete."""
        ...

    def renew(self) -> None:
        """Show the receiver that the sender lives, while there is nothing to write yet."""
        ...

    @property
    def failed(self) -> bool:
        """Whether a call has failed; what follows is in vain."""
        ...

    def cancel(self) -> None:
        """Skip what has not been written yet."""
        ...

    def close(self) -> Future[None]:
        """Done when nothing of this put is or will be under way; carries the failure, if any.

        Only then may the sender's pages be given to somebody else.
        """
        ...


class Transport(Protocol):
    """Makes this engine's region reachable and opens puts into those of others."""

    @property
    def region(self) -> Region:
        """Our own memory, that peers write into."""
        ...

    @property
    def endpoint(self) -> str:
        """How peers reach our region; travels in the address."""
        ...

    def open(self, address: KVAddress, begin: int) -> Put:
        """Claim the lease and start a put at `begin`. Reads nothing but the peer's memory.

        Raises `PeerUnreachable`, `StaleEpoch`, `LeaseExpired` if the lease has ended, `BadRange` if
        `begin` is not the watermark, `Timeout` if another writer does not let go.
        """
        ...

    def close(self) -> None:
        """Finish what is under way and let go of all memory."""
        ...
