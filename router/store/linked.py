"""The store of a worker process: calls to the store of its parent."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from router.store.link import Link
from router.store.notices import Notices
from router.store.store import Change, Document, LogEntry, Outcome, Take, Taken

__all__ = ["CHANGED", "LinkedStore"]

CHANGED = "changed"
T = TypeVar("T")


class LinkedStore:
    """Implements `SharedStore` over a `Link`, which somebody else runs."""

    def __init__(self, link: Link, notices: Notices) -> None:
        """`notices` gets the link's notices of `CHANGED`."""
        self._link = link
        self._notices = notices

    @property
    def available(self) -> bool:
        return not self._link.closed

    async def run(self) -> None:
        """Return: the link brings the notices."""

    async def wait(self, seen: int, timeout_s: float) -> int:
        return await self._notices.wait(seen, timeout_s)

    async def get(self) -> Document:
        return await self._call(Document, "get")

    async def commit(self, change: Change) -> Outcome:
        return await self._call(Outcome, "commit", change)  # type: ignore[arg-type]  # a Literal

    async def source(self, digest: str) -> bytes | None:
        return await self._call(bytes | None, "source", digest)  # type: ignore[arg-type]  # a union

    async def append(self, entry: bytes) -> None:
        await self._link.call("append", entry)

    async def log(self) -> list[LogEntry]:
        return await self._call(list[LogEntry], "log")

    async def report(self, counter: str, member: str, values: list[int]) -> list[int]:
        return await self._call(list[int], "report", counter, member, values)

    async def take(self, takes: list[Take]) -> Taken:
        return await self._call(Taken, "take", takes)

    async def announce(self, kind: str, id: str, value: bytes, ttl_s: float) -> None:
        await self._link.call("announce", kind, id, value, ttl_s)

    async def withdraw(self, kind: str, id: str) -> None:
        await self._link.call("withdraw", kind, id)

    async def members(self, kind: str) -> dict[str, bytes]:
        return await self._call(dict[str, bytes], "members", kind)

    async def close(self) -> None:
        """Do nothing: the link is its owner's."""

    async def _call(self, kind: type[T], operation: str, *arguments: Any) -> T:
        result = await self._link.call(operation, *arguments)
        return msgspec.convert(result, kind, builtin_types=(bytes,))
