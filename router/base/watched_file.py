"""A file that is read again whenever it has changed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from engine.protocol import BadRequest

__all__ = ["WatchedFile"]

log = logging.getLogger(__name__)
T = TypeVar("T")
Signature = tuple[int, int, int]
MAX_BYTES = 2**22


class WatchedFile(Generic[T]):
    """The file at `path`, understood by `parse`, which raises `BadRequest` for what it cannot take.

    `value` is the last good content. A change that is bad, or a file that has gone, keeps it, and
    `trouble` says why until the file is good again. Editors, `mv` and Kubernetes's symbolic links
    are all changes: what counts is the inode, the size and the time of what the path leads to.
    """

    def __init__(self, path: Path, parse: Callable[[str], T]) -> None:
        """Reads it. Raises `BadRequest` if that cannot be done: there is nothing to keep yet."""
        self.path = path
        self.trouble = ""
        self._parse = parse
        self._seen: Signature | None = None
        self.value: T = self._read()

    async def watch(self, interval_s: float, changed: Callable[[T], None]) -> None:
        """Call `changed` with each new content, until cancelled. Looks every `interval_s`."""
        while True:
            await asyncio.sleep(interval_s)
            try:
                if self._signature() == self._seen:
                    continue
                self.value = await asyncio.to_thread(self._read)
            except BadRequest as error:
                if error.message != self.trouble:
                    self.trouble = error.message
                    log.warning("%s; what was read before stays in force", error.message)
                continue
            self.trouble = ""
            log.info("%s was read again", self.path)
            changed(self.value)

    def _signature(self) -> Signature:
        try:
            stat = self.path.stat()
        except OSError as error:
            self._seen = None
            raise BadRequest(f"{self.path}: {error.strerror}") from None
        return stat.st_ino, stat.st_size, stat.st_mtime_ns

    def _read(self) -> T:
        signature = self._signature()
        try:
            if signature[1] > MAX_BYTES:
                raise BadRequest(f"{self.path}: more than {MAX_BYTES} bytes")
            content = self._parse(self.path.read_text())
        except (OSError, UnicodeDecodeError) as error:
            raise BadRequest(f"{self.path}: cannot be read ({type(error).__name__})") from None
        except BadRequest as error:
            self._seen = signature  # no need to read the same again
            raise BadRequest(f"{self.path}: {error.message}") from None
        self._seen = signature
        return content
