"""The request ids that were released."""

from __future__ import annotations

from engine.protocol import DuplicateRequest

__all__ = ["ReleasedIds"]

REMEMBERED = 16_384  # ids; one takes about 100 bytes


class ReleasedIds:
    """The latest released request ids, so that late calls under them are refused.

    Calls of a client that has gone away may arrive after their release, on another connection.
    """

    def __init__(self) -> None:
        self._ids: dict[str, None] = {}  # the latest last

    def add(self, request_id: str) -> None:
        """Remember an id; forget the oldest one if there are too many."""
        self._ids.pop(request_id, None)
        self._ids[request_id] = None
        if len(self._ids) > REMEMBERED:
            del self._ids[next(iter(self._ids))]

    def check(self, request_id: str) -> None:
        """Raise `DuplicateRequest` for a released id."""
        if request_id in self._ids:
            raise DuplicateRequest(f"{request_id} has been released", param="request_id")
