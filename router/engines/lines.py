"""Splits a stream from an engine into lines."""

from __future__ import annotations

from router.base import EngineUnreachable

__all__ = ["Lines"]


class Lines:
    """The lines of a stream that arrives in pieces. `most` is the length of the longest (bytes)."""

    __slots__ = ("_most", "_rest")

    def __init__(self, most: int) -> None:
        self._most = most
        self._rest = bytearray()  # the beginning of an incomplete line

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that `data` completes, without their line feeds.

        Raises `EngineUnreachable` if a line is too long.
        """
        if b"\n" not in data:
            self._rest += data
            if len(self._rest) > self._most:
                raise EngineUnreachable(f"the engine sent a line of more than {self._most} bytes")
            return []
        if self._rest:
            data = bytes(self._rest) + data
            self._rest.clear()
        *lines, rest = data.split(b"\n")
        self._rest += rest
        return lines
