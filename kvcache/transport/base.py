"""The interface of a transport: how an engine reaches the pools of its peers."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from kvcache.errors import Internal
from kvcache.lease import KVAddress, Put
from kvcache.memory import PoolLayout, Region

__all__ = ["Registered", "Transport"]


R = TypeVar("R")


class Transport(Protocol):
    """Makes this engine's memory reachable and opens puts into that of others."""

    def allocate(self, layout: PoolLayout) -> Region:
        """Make memory of a kind that peers can reach through this transport. It is the caller's."""
        ...

    def register(self, region: Region) -> None:
        """Let peers write into `region`, which `allocate` made; puts read from it. Called once.

        The owner closes the region after the transport. Raises `Internal` for memory of another
        kind, and `OSError` if the transport cannot listen.
        """
        ...

    @property
    def region(self) -> Region:
        """The registered memory. Raises `Internal` before there is any."""
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
        """Finish the puts in flight and release peers' memory; the owner closes the region."""
        ...


class Registered(Generic[R]):
    """The region that a transport was given: what `Transport.register` keeps."""

    def __init__(self, kind: type[R]) -> None:
        """Accept regions of one class."""
        self._kind = kind
        self._region: R | None = None

    def set(self, region: Region) -> R:
        """Keep `region` and return it. Raises `Internal` for another kind or a second region."""
        if not isinstance(region, self._kind) or self._region is not None:
            raise Internal(f"a {type(region).__name__} cannot be registered here")
        self._region = region
        return region

    def get(self) -> R:
        """Return the region. Raises `Internal` before there is one."""
        if self._region is None:
            raise Internal("no memory is registered with the transport")
        return self._region
