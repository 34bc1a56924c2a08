"""The interface of a store that several routers share, and the values that pass through it."""

from __future__ import annotations

from typing import Literal, Protocol

from msgspec import Struct

__all__ = [
    "KEPT",
    "MOST_DOCUMENT",
    "MOST_SOURCE",
    "RESTORE_S",
    "Change",
    "Document",
    "LogEntry",
    "Outcome",
    "SharedStore",
    "Take",
    "Taken",
]

KEPT = 1000  # newest entries of the log
MOST_DOCUMENT = 1 << 20  # bytes
MOST_SOURCE = 32 << 20  # bytes
# After a document was created or restored, all routers have this time to find it, and to replace
# it by a newer one that they still know. Meanwhile nothing else is committed.
RESTORE_S = 2.0
COUNTER_S = 7 * 86400  # a counter without reports for so long is dropped

Outcome = Literal["done", "stale", "settling"]


class Document(Struct, frozen=True):
    """A value and its version, which grows by one with each change. Version 0 is no document."""

    version: int
    value: bytes


class Change(Struct, frozen=True):
    """A new document, and what is stored, dropped and logged together with it, or not at all.

    `expected` is the version found before. `restoring`: the document is created, or was lost.
    """

    expected: int
    document: Document
    sources: dict[str, bytes] = {}
    dropped: list[str] = []
    entries: list[bytes] = []
    restoring: bool = False


class LogEntry(Struct, frozen=True):
    """An entry of the log; numbers begin at 1 and have no gaps."""

    number: int
    value: bytes


class Take(Struct, frozen=True):
    """What to take out of a bucket that fills evenly with `limit` per minute, and holds as much.

    It must hold `needed` before `amount` is taken, which may overdraw it.
    """

    bucket: str
    limit: int
    needed: float
    amount: float


class Taken(Struct, frozen=True):
    """Whether all was taken, or nothing, and what each bucket holds now."""

    admitted: bool
    levels: list[float]


class SharedStore(Protocol):
    """A store. Its calls end within a few seconds and raise `StoreUnavailable` if it is lost.

    A call that raises it may have been carried out.
    """

    @property
    def available(self) -> bool:
        """Whether the latest call was answered."""

    async def run(self) -> None:
        """Receive notices of changes, until cancelled."""

    async def wait(self, seen: int, timeout_s: float) -> int:
        """Wait until there are more notices of changes than `seen`, or for `timeout_s` seconds.

        Returns how many there have been.
        """

    async def get(self) -> Document:
        """Return the document; version 0 if there is none."""

    async def commit(self, change: Change) -> Outcome:
        """Replace the document if its version is the expected one.

        `stale`: it is another one. `settling`: the document was restored less than `RESTORE_S` ago.
        """

    async def source(self, digest: str) -> bytes | None:
        """Return what was stored under `digest`, of `MOST_SOURCE` bytes at most."""

    async def append(self, entry: bytes) -> None:
        """Append an entry to the log."""

    async def log(self) -> list[LogEntry]:
        """Return the newest `KEPT` entries of the log, oldest first."""

    async def report(self, counter: str, member: str, values: list[int]) -> list[int]:
        """Set a member's part of a counter; return the sums over all members."""

    async def take(self, takes: list[Take]) -> Taken:
        """Take from all buckets, or from none."""

    async def announce(self, kind: str, id: str, value: bytes, ttl_s: float) -> None:
        """Make a member known for `ttl_s` seconds; others are notified if its value is new."""

    async def withdraw(self, kind: str, id: str) -> None:
        """Remove a member."""

    async def members(self, kind: str) -> dict[str, bytes]:
        """Return the members of a kind, by id."""

    async def close(self) -> None:
        """Close the connections."""
