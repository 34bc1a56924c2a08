"""What a transport is: a way to reach a peer's pool, and one writer of one lease there."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

from kvcache.errors import PeerUnreachable
from kvcache.memory.region import Region
from kvcache.transport.address import KVAddress
from kvcache.types import PageId

__all__ = ["Put", "Transport", "after_scheme"]


class Put(Protocol):
    """The one-sided put with signal: writes into one receive lease of a peer.

    Calls return at once; the work is done in the order of the calls, beside the caller's own. The
    first failure is kept, what follows is skipped, and `close` tells.
    """

    bytes_sent: int
    claim: int  # what other workers of this sender join with

    def write(self, layers: range, pages: Sequence[PageId], begin: int, end: int) -> None:
        """Put positions `[begin, end)` of `layers`; `pages` are the sender's, from position 0.

        They may still be in the making: work that the caller has started on the pool's device is
        waited for, not by the caller. Layers are counted as in the sender's pool. What of them, and
        of their heads, the receiver's pool is not for is left out.
        """
        ...

    def signal(self, landed: int) -> None:
        """Raise the receiver's watermark to `landed` once all writes so far are complete.

        Where several workers of a sender write, it is for the lead to do, after the others' `close`
        is done for these positions too; for those who have joined it raises `Internal`.
        """
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
        """How peers reach our region, with the transport's name first: `name:…`; travels in the
        address."""
        ...

    def open(self, address: KVAddress, begin: int, join: int | None = None) -> Put:
        """Claim the lease and start a put at `begin`. Reads nothing but the peer's memory.

        A lease has one writer. If that is split over workers, one of them, the lead, claims, and
        the others `join` with its `Put.claim`, before anything is signalled: they may write what
        they have of the positions, at the same time, and only the lead signals. Who then claims the
        lease fences them all.

        Raises `PeerUnreachable`, `StaleEpoch`, `LeaseExpired` if the lease has ended or has another
        claim than the one to join, `BadRange` if `begin` is not the watermark, `Timeout` if another
        writer does not let go.
        """
        ...

    def close(self) -> None:
        """Finish what is under way and let go of all memory."""
        ...


def after_scheme(endpoint: str, name: str) -> str:
    """An endpoint without its transport's name. Raises `PeerUnreachable` for another name."""
    scheme, _, rest = endpoint.partition(":")
    if scheme != name:
        raise PeerUnreachable(f"cannot put to {endpoint} with the transport {name}")
    return rest
