"""The connections of a virtual debtor to its creditors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine.protocol import PeerUnreachable, StaleEpoch
from engine.virtual.put import Endpoint
from kvcache.types import EngineId

__all__ = ["VirtualLinks"]


class VirtualLinks:
    """The `engine.borrowing.Links` of a virtual engine. To connect takes no time."""

    def __init__(self, peers: Mapping[str, Endpoint]) -> None:
        """`peers` are all engines that can be reached, by their endpoints."""
        self._peers = peers
        self._links: dict[EngineId, Endpoint] = {}

    def connected(self) -> list[EngineId]:
        """See `Links.connected`."""
        return [name for name, peer in self._links.items() if peer.alive]

    async def connect(self, creditor: EngineId, endpoints: Sequence[str], epoch: int) -> None:
        """See `Links.connect`."""
        peer = next((self._peers[each] for each in endpoints if each in self._peers), None)
        if peer is None or not peer.alive:
            raise PeerUnreachable(f"no endpoint of {creditor} can be reached")
        if peer.epoch != epoch:
            raise StaleEpoch(f"{creditor} has been restarted since")
        self._links[creditor] = peer

    def disconnect(self, creditor: EngineId) -> None:
        """See `Links.disconnect`."""
        self._links.pop(creditor, None)

    def find(self, creditor: EngineId) -> Endpoint | None:
        """Return a creditor that can be asked now, or None."""
        peer = self._links.get(creditor)
        return peer if peer is not None and peer.alive else None
