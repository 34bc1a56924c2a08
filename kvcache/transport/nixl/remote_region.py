"""A receiver's region as it describes it to a sender, behind the handshake's proof."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from kvcache.errors import PeerUnreachable

__all__ = ["RemoteRegion"]


@dataclass(frozen=True, slots=True)
class RemoteRegion:
    """What a sender needs to write into a receiver's memory."""

    metadata: str  # of the receiver's NIXL agent for this one sender; hex
    table: int  # address of the slots
    pool: int  # address of the pool
    pages: int  # KVLayout.pages
    party: int  # index of the sender's flag in each slot's row

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RemoteRegion:
        """Return the region of a description. Raises `PeerUnreachable` for any other text."""
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError) as error:
            raise PeerUnreachable("the receiver runs an incompatible version") from error
