"""A proxy in front of one engine that can hold a chosen call at a chosen moment.

It forwards bytes unchanged. The proxy's address stays the same when the engine dies and another
process replaces it. In between, the address refuses connections, as an engine's own would.
"""

from __future__ import annotations

import asyncio
import re
import socket
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["HoldPoint", "Moment", "Proxy"]

Moment = Literal["called", "answered", "token"]
CALL = re.compile(rb"(?:POST|GET) /microserving/(\w+)")
# Calls that a strategy makes. The router makes the others itself: health checks and releases.
CALLS = frozenset({"prep_recv", "remote_send", "start_generate", "commit", "pin", "unpin"})
STREAM = "stream"  # carries the tokens of all generations on an engine
CHUNK = 64 * 1024
LONGEST_LINE = 16 * 1024 * 1024  # of a stream


@dataclass(eq=False, slots=True)
class HoldPoint:
    """Holds the `number`th call that passes any proxy, counted from 0 since the hold point was set.

    The moment `called` is before the request reaches the engine, `answered` before the reply
    reaches the router. The moment `token` counts steps that bring tokens instead of calls.
    `reached` is set when the call is held; it proceeds once `released` is set. `engine` and `call`
    identify it, and `receiver` is the engine that was last called for a lease.
    """

    moment: Moment
    number: int
    reached: asyncio.Event = field(default_factory=asyncio.Event)
    released: asyncio.Event = field(default_factory=asyncio.Event)
    engine: str = ""
    call: str = ""
    receiver: str = ""
    _passed: int = 0

    async def meet(self, moment: Moment, engine: str, call: str) -> None:
        """Wait here if this is the call to hold."""
        if call == "prep_recv" and moment == "called" and not self.reached.is_set():
            self.receiver = engine
        if moment != self.moment:
            return
        number, self._passed = self._passed, self._passed + 1
        if number == self.number:
            self.engine, self.call = engine, call
            self.reached.set()
            await self.released.wait()


class Proxy:
    """Listens at `url` on behalf of the engine `name` between `open` and `close`, repeatedly."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.hold_point: HoldPoint | None = None
        self._port = 0
        self._engine_port = 0
        self._listener: socket.socket | None = None
        self._connections: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def open(self, engine_port: int) -> None:
        """Listen, and forward to the engine at `engine_port`.

        Raises `OSError` if the address is in use.
        """
        self._engine_port = engine_port
        self._listener = socket.create_server(("127.0.0.1", self._port), backlog=512)
        self._listener.setblocking(False)
        self._port = self._listener.getsockname()[1]
        # Closing asyncio's own server would leave connections open that it has just accepted.
        asyncio.get_running_loop().add_reader(self._listener, self._accept, self._listener)

    async def close(self) -> None:
        """Stop listening and break all connections. Idempotent."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        if broken := list(self._connections):
            for connection in broken:
                connection.cancel()
            await asyncio.wait(broken)

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):  # the client has left
            client, _ = listener.accept()
            connection = asyncio.ensure_future(self._serve(client))
            self._connections.add(connection)
            connection.add_done_callback(self._connections.discard)

    async def _serve(self, accepted: socket.socket) -> None:
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client, reply = await asyncio.open_connection(sock=accepted)
        try:
            with suppress(OSError):
                await self._connect(client, reply)
        finally:
            reply.transport.abort()

    async def _connect(self, client: asyncio.StreamReader, reply: asyncio.StreamWriter) -> None:
        answer, request = await asyncio.open_connection(
            "127.0.0.1", self._engine_port, limit=LONGEST_LINE
        )
        connection = _Connection(self)
        try:
            async with asyncio.TaskGroup() as directions:
                forward = directions.create_task(connection.forward(client, request))
                backward = directions.create_task(connection.backward(answer, reply))
                forward.add_done_callback(lambda _: backward.cancel())
                backward.add_done_callback(lambda _: forward.cancel())
        finally:
            request.transport.abort()


class _Connection:
    """One connection of the router: consecutive calls, or a stream."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy
        self._call = ""

    async def forward(self, client: asyncio.StreamReader, request: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await client.read(CHUNK):
                if found := CALL.match(data):
                    self._call = found[1].decode()
                    if self._call in CALLS:
                        await self._meet("called")
                        if client.at_eof() or client.exception() is not None:
                            return  # the router has left: the engine never sees the call
                request.write(data)
                await request.drain()

    async def backward(self, answer: asyncio.StreamReader, reply: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await self._next(answer):
                if self._call == STREAM:
                    if b'"token_ids"' in data:
                        await self._meet("token")
                elif self._call in CALLS:
                    await self._meet("answered")
                    self._call = ""
                reply.write(data)
                await reply.drain()

    async def _next(self, answer: asyncio.StreamReader) -> bytes:
        """Read what to forward at once: of a stream one line, which is the output of one step."""
        return await (answer.readline() if self._call == STREAM else answer.read(CHUNK))

    async def _meet(self, moment: Moment) -> None:
        if self._proxy.hold_point is not None:
            await self._proxy.hold_point.meet(moment, self._proxy.name, self._call)
