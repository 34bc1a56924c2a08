"""A store in the memory of one process."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

from router.store.bucket import Bucket
from router.store.notices import Notices
from router.store.store import KEPT, Change, Document, LogEntry, Outcome, Take, Taken

__all__ = ["MemoryStore"]

MOST_BUCKETS = 100_000  # then the full ones are dropped


@dataclass(slots=True)
class _Member:
    value: bytes
    until: float


@dataclass(slots=True)
class _Log:
    last: int = 0
    entries: deque[LogEntry] = field(default_factory=lambda: deque(maxlen=KEPT))

    def append(self, value: bytes) -> None:
        self.last += 1
        self.entries.append(LogEntry(self.last, value))


class MemoryStore:
    """Implements `SharedStore` for the tasks of one process. Its calls neither wait nor fail.

    It is never lost while its users live, so nothing is restored, and changes never wait for it.
    """

    def __init__(self, clock: Callable[[], float], *, restore_s: float = 0.0) -> None:
        """`clock` returns seconds. `restore_s`: how long changes wait after a restoration."""
        self._clock = clock
        self._restore_s = restore_s
        self._notices = Notices()
        self._document = Document(0, b"")
        self._settled_at = 0.0
        self._sources: dict[str, bytes] = {}
        self._log = _Log()
        self._counters: dict[str, dict[str, list[int]]] = {}
        self._buckets: dict[tuple[str, int], Bucket] = {}
        self._members: dict[str, dict[str, _Member]] = {}
        self.on_change: list[Callable[[], None]] = []

    @property
    def available(self) -> bool:
        return True

    async def run(self) -> None:
        """Return: notices come without it."""

    async def wait(self, seen: int, timeout_s: float) -> int:
        return await self._notices.wait(seen, timeout_s)

    async def get(self) -> Document:
        return self._document

    async def commit(self, change: Change) -> Outcome:
        if change.expected != self._document.version:
            return "stale"
        now = self._clock()
        if not change.restoring and now < self._settled_at:
            return "settling"
        if change.restoring:
            self._settled_at = now + self._restore_s
        self._sources.update(change.sources)
        for digest in change.dropped:
            self._sources.pop(digest, None)
        self._document = change.document
        for entry in change.entries:
            self._log.append(entry)
        self._changed()
        return "done"

    async def source(self, digest: str) -> bytes | None:
        return self._sources.get(digest)

    async def append(self, entry: bytes) -> None:
        self._log.append(entry)

    async def log(self) -> list[LogEntry]:
        return list(self._log.entries)

    async def report(self, counter: str, member: str, values: list[int]) -> list[int]:
        if counter not in self._counters and len(self._counters) >= KEPT:
            del self._counters[next(iter(self._counters))]
        parts = self._counters.setdefault(counter, {})
        parts[member] = values
        return [sum(part) for part in zip(*parts.values(), strict=True)]

    async def take(self, takes: list[Take]) -> Taken:
        now = self._clock()
        buckets = [self._bucket(take, now) for take in takes]
        admitted = all(
            bucket.level(now) >= take.needed for bucket, take in zip(buckets, takes, strict=True)
        )
        if admitted:
            for bucket, take in zip(buckets, takes, strict=True):
                bucket.take(take.amount, now)
        return Taken(admitted, [bucket.level(now) for bucket in buckets])

    async def announce(self, kind: str, id: str, value: bytes, ttl_s: float) -> None:
        known = self._members.setdefault(kind, {})
        new = id not in known or known[id].value != value
        known[id] = _Member(value, self._clock() + ttl_s)
        if new:
            self._changed()

    async def withdraw(self, kind: str, id: str) -> None:
        if self._members.get(kind, {}).pop(id, None) is not None:
            self._changed()

    async def members(self, kind: str) -> dict[str, bytes]:
        known, now = self._members.get(kind, {}), self._clock()
        for id in [id for id, member in known.items() if member.until < now]:
            del known[id]
        return {id: member.value for id, member in known.items()}

    async def close(self) -> None:
        """Do nothing."""

    def _bucket(self, take: Take, now: float) -> Bucket:
        name = (take.bucket, take.limit)
        if (bucket := self._buckets.get(name)) is None:
            if len(self._buckets) >= MOST_BUCKETS:
                full = (key for key, one in self._buckets.items() if one.level(now) >= one.limit)
                for key in list(islice(full, MOST_BUCKETS)):
                    del self._buckets[key]
            bucket = self._buckets[name] = Bucket(take.limit, now)
        return bucket

    def _changed(self) -> None:
        self._notices.notify()
        for notify in self.on_change:
            notify()
