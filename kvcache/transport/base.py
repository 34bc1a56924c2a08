"""The interface of a transport: how an engine reaches the pools of its peers."""

from __future__ import annotations

from typing import Protocol

from kvcache.errors import PeerUnreachable
from kvcache.lease.address import KVAddress
from kvcache.lease.put import Put
from kvcache.memory.region import Region

__all__ = ["Transport", "after_scheme"]


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
