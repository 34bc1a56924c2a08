"""A proxy before one engine, which can hold the router at a chosen moment of a chosen call.

It passes bytes and changes none. An engine's address stays when it dies and another process takes
its place; in between nobody listens there, as it would be without a proxy.
"""

from __future__ import annotations

import asyncio
import re
import socket
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["Gate", "Moment", "Proxy"]

Moment = Literal["asked", "answered", "token"]
CALL = re.compile(rb"(?:POST|GET) /microserving/(\w+)")
# What a strategy asks for; the rest is the router's own: health, and the end of what it began.
CALLS = frozenset({"prep_recv", "remote_send", "start_generate", "commit", "pin", "unpin"})
STREAM = "stream"  # on which an engine's tokens come
CHUNK = 64 * 1024
LONGEST = 16 * 1024 * 1024  # line of a stream


@dataclass(eq=False, slots=True)
class Gate:
    """Stops the `number`th call that passes any proxy from now on, counted from 0: when it is
    `asked`, before the engine knows of it, or `answered`, before the router knows.

    `token` counts the steps whose tokens come instead. `reached` is set when it is there, and it
    waits until `opened`; `engine` and `call` say which it is, and `receiver` whose lease is the
    latest.
    """

    moment: Moment
    number: int
    reached: asyncio.Event = field(default_factory=asyncio.Event)
    opened: asyncio.Event = field(default_factory=asyncio.Event)
    engine: str = ""
    call: str = ""
    receiver: str = ""
    _passed: int = 0

    async def meet(self, moment: Moment, engine: str, call: str) -> None:
        """Something passes; returns when it may go on."""
        if call == "prep_recv" and moment == "asked" and not self.reached.is_set():
            self.receiver = engine
        if moment != self.moment:
            return
        number, self._passed = self._passed, self._passed + 1
        if number == self.number:
            self.engine, self.call = engine, call
            self.reached.set()
            await self.opened.wait()


class Proxy:
    """Listens at `url` for the engine `name`, from `open` until `close`, as often as wanted."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.gate: Gate | None = None
        self._port = 0
        self._engine_port = 0
        self._listener: socket.socket | None = None
        self._connections: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def open(self, engine_port: int) -> None:
        """Pass on to the engine at `engine_port`. Raises `OSError` if its address is taken."""
        self._engine_port = engine_port
        self._listener = socket.create_server(("127.0.0.1", self._port), backlog=512)
        self._listener.setblocking(False)
        self._port = self._listener.getsockname()[1]
        # Not asyncio's server: what that has just accepted when it is closed, stays open for long.
        asyncio.get_running_loop().add_reader(self._listener, self._accept, self._listener)

    async def close(self) -> None:
        """Nobody listens any longer, and all connections are broken. Idempotent."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        if broken := list(self._connections):
            for connection in broken:
                connection.cancel()
            await asyncio.wait(broken)

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):  # the client has left already
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
            "127.0.0.1", self._engine_port, limit=LONGEST
        )
        passing = _Connection(self)
        try:
            async with asyncio.TaskGroup() as ways:
                forth = ways.create_task(passing.forth(client, request))
                back = ways.create_task(passing.back(answer, reply))
                forth.add_done_callback(lambda _: back.cancel())
                back.add_done_callback(lambda _: forth.cancel())
        finally:
            request.transport.abort()


class _Connection:
    """One connection: a call at a time, or a stream."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy
        self._call = ""

    async def forth(self, client: asyncio.StreamReader, request: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await client.read(CHUNK):
                if found := CALL.match(data):
                    self._call = found[1].decode()
                    if self._call in CALLS:
                        await self._meet("asked")
                        if client.at_eof() or client.exception() is not None:
                            return  # the router has left meanwhile: the engine never knows
                request.write(data)
                await request.drain()

    async def back(self, answer: asyncio.StreamReader, reply: asyncio.StreamWriter) -> None:
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
        """What to pass on together: of a stream a line, which is what came of one step."""
        return await (answer.readline() if self._call == STREAM else answer.read(CHUNK))

    async def _meet(self, moment: Moment) -> None:
        if self._proxy.gate is not None:
            await self._proxy.gate.meet(moment, self._proxy.name, self._call)
