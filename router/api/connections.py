"""The open connections of a server, and what they have in common."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from email.utils import formatdate
from typing import Protocol

from router.api.connection import Connection
from router.api.http import HttpRequest

__all__ = ["Connections", "Service"]


class Service(Protocol):
    """What answers the requests of all connections."""

    async def serve(self, http: HttpRequest) -> None:
        """Answer. Cancelled when the client goes away, or the server ends."""

    def headers(self, http: HttpRequest) -> Mapping[str, str]:
        """What each answer has in its head, beside what it says itself."""


class Connections:
    """All that are open, and what they have in common."""

    def __init__(self, service: Service, max_body: int) -> None:
        """`max_body`: bytes of a request's body, at most."""
        self.service = service
        self.max_body = max_body
        self.open: set[Connection] = set()
        self.closing = False
        self._empty = asyncio.Event()  # once it closes
        self._second = -1
        self._date = b""

    def connection(self) -> Connection:
        """For one that is accepted."""
        return Connection(self)

    def forget(self, connection: Connection) -> None:
        """It is closed."""
        self.open.discard(connection)
        if self.closing and not self.open:
            self._empty.set()

    async def close(self, bound_s: float) -> None:
        """Close those that are idle, and others as soon as they have answered and the client has
        read it; after `bound_s` seconds all of them, which cancels what they serve."""
        self.closing = True
        for connection in list(self.open):
            if connection.task is None:
                connection.transport.close()
        if self.open:
            with suppress(TimeoutError):
                async with asyncio.timeout(bound_s):
                    await self._empty.wait()
        busy = [connection.task for connection in self.open if connection.task is not None]
        for connection in list(self.open):
            connection.transport.abort()
        if busy:
            await asyncio.wait(busy)

    def date(self) -> bytes:
        """The `Date` header, made once a second."""
        now = int(time.time())
        if now != self._second:
            self._second, self._date = now, f"Date: {formatdate(now, usegmt=True)}\r\n".encode()
        return self._date
