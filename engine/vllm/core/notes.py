"""Notes from the engine core to the lead: one JSON object per line, over a unix socket."""

from __future__ import annotations

import logging
import socket
import threading
from queue import SimpleQueue
from typing import Any

import orjson

__all__ = ["Notes"]

log = logging.getLogger(__name__)


class Notes:
    """Sends notes in order, on a thread of its own, so that no step waits for the lead."""

    def __init__(self, path: str) -> None:
        """Connect to the lead's socket. Raises `OSError`."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(path)
        self._queue: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="notes", daemon=True)
        self._thread.start()

    def send(self, note: dict[str, Any]) -> None:
        """Queue a note. Thread-safe."""
        self._queue.put(note)

    def close(self) -> None:
        """Send what is queued, and end."""
        self._queue.put(None)
        self._thread.join(timeout=1.0)
        self._socket.close()

    def _run(self) -> None:
        while (note := self._queue.get()) is not None:
            try:
                self._socket.sendall(orjson.dumps(note) + b"\n")
            except OSError as error:  # the lead has ended, and this process ends with it
                log.info("the lead reads no notes: %s", error)
                return
