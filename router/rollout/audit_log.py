"""Who changed which strategy runs, and when: an append-only log, one JSON object per line."""

from __future__ import annotations

import logging
import os
from collections import deque
from datetime import UTC, datetime
from typing import Any

import orjson

__all__ = ["AuditLog"]

log = logging.getLogger(__name__)
KEPT = 1000


class AuditLog:
    """The newest entries in memory, and all of them in a file, if one is configured.

    The file is opened for appending, and only its owner can read it. Raises `OSError` if it cannot
    be opened. A line that cannot be written is logged, since the change has happened.
    """

    def __init__(self, path: str = "") -> None:
        self._entries: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self._file: int | None = None
        if path:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._file = os.open(path, flags, 0o600)
            os.fchmod(self._file, 0o600)  # it may have existed before

    def note(self, who: str, what: str, **fields: Any) -> None:
        """Add an entry. `who` is a key's name, a loopback address, or `router` itself."""
        self.add(self.entry(who, what, **fields))

    @staticmethod
    def entry(who: str, what: str, **fields: Any) -> dict[str, Any]:
        """Make an entry."""
        at = datetime.now(UTC).isoformat(timespec="milliseconds")
        return {"at": at, "who": who, "what": what, **fields}

    def add(self, entry: dict[str, Any]) -> None:
        """Add an entry that was made."""
        self._entries.append(entry)
        if self._file is None:
            return
        try:
            os.write(self._file, orjson.dumps(entry, option=orjson.OPT_NON_STR_KEYS) + b"\n")
        except OSError:
            log.exception("the audit log cannot be written: %s", entry)

    def entries(self) -> list[dict[str, Any]]:
        """Return the newest entries, oldest first."""
        return list(self._entries)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
