"""Server-sent events, split as the bytes arrive."""

from __future__ import annotations

__all__ = ["DONE", "EventSplitter"]

DATA = b"data: "
DONE = b"[DONE]"  # OpenAI-style servers end a complete stream with it


class EventSplitter:
    """Splits a stream of server-sent events with one `data:` line each.

    Lines end at a line feed only. `httpx`'s line iterators also split at U+2028 and the like, which
    JSON strings may contain.
    """

    def __init__(self) -> None:
        self._partial = b""

    def feed(self, received: bytes) -> list[bytes]:
        """Return the data of each event that `received` completes, `DONE` included.

        Comments and blank lines are skipped.
        """
        *lines, self._partial = (self._partial + received).split(b"\n")
        return [line[len(DATA) :].rstrip(b"\r") for line in lines if line.startswith(DATA)]
