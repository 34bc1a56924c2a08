"""The interface of a transport: how an engine reaches the pools of its peers."""

from __future__ import annotations

from typing import Protocol

from kvcache.errors import PeerUnreachable
from kvcache.lease.address import KVAddress
from kvcache.lease.put import Put
from kvcache.memory.region import Region

__all__ = ["Transport", "strip_scheme"]


class Transport(Protocol):
    """Makes this engine's region reachable and opens puts into the regions of peers."""

    @property
    def region(self) -> Region:
        """This engine's memory, which peers write into."""
        ...

    @property
    def endpoint(self) -> str:
        """How peers reach this region, as `name:…` with the transport's name; part of the
        address."""
        ...

    def open(self, address: KVAddress, begin: int, join: int | None = None) -> Put:
        """Claim the lease and start a put at `begin`. Reads only the peer's memory.

        A lease has one writer. Where the writer is split over workers, the lead claims the lease
        and the others `join` with its `Put.claim` before the first signal. They write their layers
        and heads of the positions concurrently, and only the lead signals. A later claim by another
        sender fences all of them.

        Raises: `PeerUnreachable`; `StaleEpoch`; `LeaseExpired` if the lease has ended or its claim
        is not `join`; `BadRange` if `begin` is not the watermark; `Timeout` if another writer does
        not release the write right.
        """
        ...

    def close(self) -> None:
        """Finish the puts in flight and release all memory."""
        ...


def strip_scheme(endpoint: str, name: str) -> str:
    """Return `endpoint` without the `name:` in front.

    Raises: `PeerUnreachable` if the endpoint belongs to another transport.
    """
    scheme, _, rest = endpoint.partition(":")
    if scheme != name:
        raise PeerUnreachable(f"the {name} transport cannot reach {endpoint}")
    return rest
