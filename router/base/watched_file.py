"""A file that is read again whenever it changes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Generic, TypeVar

from watchfiles import awatch

from engine.protocol import BadRequest

__all__ = ["WatchedFile", "changes_of"]

log = logging.getLogger(__name__)
# It logs each change: a log file in the watched folder would change for ever.
logging.getLogger("watchfiles").setLevel(logging.WARNING)
T = TypeVar("T")
Signature = tuple[int, int, int]
MAX_BYTES = 2**22


class WatchedFile(Generic[T]):
    """The file at `path`, read by `parse`, which raises `BadRequest` for contents it refuses.

    `value` is the last good content. After a bad change, or if the file is gone, it stays, and
    `trouble` says why until the file is good again. A file counts as changed if the inode, the size
    or the modification time of what `path` leads to has changed; that covers editors, `mv`, and
    the symbolic links of a Kubernetes volume.
    """

    def __init__(self, path: Path, parse: Callable[[str], T]) -> None:
        """Read the file. Raises `BadRequest` if it cannot be read or is refused."""
        self.path = path
        self.trouble = ""
        self._parse = parse
        self._seen: Signature | None = None
        self.value: T = self._read()

    async def watch(self, interval_s: float, changed: Callable[[T], None]) -> None:
        """Call `changed` with each new content, until cancelled; `interval_s` as `changes_of`."""
        async with aclosing(changes_of(self.path, interval_s)) as changes:
            async for _ in changes:
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
            self._seen = signature  # the same content need not be read again
            raise BadRequest(f"{self.path}: {error.message}") from None
        self._seen = signature
        return content


async def changes_of(path: Path, interval_s: float) -> AsyncGenerator[None, None]:
    """Yield when the file at `path` may have changed, and at least every `interval_s` seconds.

    The operating system reports changes in the folder of `path`, and in that of the file that it
    links to. The regular looks find what it does not report: changes made by other machines on a
    network file system, a replaced folder, and a change that came between a look and the watch.
    """
    while True:
        yield  # the folders may have changed before they were watched
        if not (folders := _folders(path)):
            await asyncio.sleep(interval_s)
            continue
        try:
            async with aclosing(
                awatch(
                    *folders,
                    watch_filter=None,
                    recursive=False,
                    rust_timeout=max(1, int(interval_s * 1e3)),
                    yield_on_timeout=True,
                )
            ) as reports:
                async for _ in reports:
                    yield
                    if _folders(path) != folders:
                        break
        except OSError:  # a folder is gone
            await asyncio.sleep(interval_s)


def _folders(path: Path) -> dict[Path, int]:
    """Return the folders to watch, with their inodes; those that are gone are left out."""
    folders: dict[Path, int] = {}
    for folder in (path.parent, path.resolve().parent):
        try:
            folders[folder] = folder.stat().st_ino
        except OSError:
            continue
    return folders
