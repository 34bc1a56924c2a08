"""What a connection may buffer, over real sockets, in front of a small application."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from starlette.types import Receive, Scope, Send
from uvicorn import Config
from uvicorn.server import ServerState
from waiting import until

from engine.protocol import MicroserveError
from engine.web import BodyBudget, BoundedHttpProtocol, check_input, linger

MIB = 1 << 20


class Reader:
    """An application that reads a body once `gate` is open, and answers with its length."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.running += 1
        await self.gate.wait()
        status, size, more = 200, 0, True
        try:
            while more:
                check_input(scope["state"])
                message = await receive()
                size += len(message.get("body", b""))
                more = message.get("more_body", False)
            check_input(scope["state"])
        except MicroserveError as error:
            status = error.status
        connection, answer = scope["state"]["connection"], b"%d" % size
        headers = [(b"content-length", b"%d" % len(answer))]
        lingers = not connection.arrived
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": answer, "more_body": lingers})
        if lingers:
            await linger(connection, receive)
            await send({"type": "http.response.body", "body": b"", "more_body": False})


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def answer(self) -> tuple[int, int]:
        """Return status and body of the next answer."""
        async with asyncio.timeout(10):
            head = await self.reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].split()[0])
            return int(head.split()[1]), int(await self.reader.readexactly(length))

    async def ended(self) -> bool:
        """Return whether the connection ends without a further byte."""
        async with asyncio.timeout(10):
            return await self.reader.read() == b""


@asynccontextmanager
async def served(budget: BodyBudget) -> AsyncIterator[tuple[Reader, ServerState, list[Client]]]:
    """Serve a `Reader` and connect to it three times."""
    app, state, clients = Reader(), ServerState(), []
    config = Config(
        app, http=BoundedHttpProtocol, ws="none", interface="asgi3", lifespan="off",
        log_config=None, access_log=False,
    )  # fmt: skip
    config.load()
    server = await asyncio.get_running_loop().create_server(
        lambda: BoundedHttpProtocol(config, state, {}, budget=budget), "127.0.0.1", 0
    )
    address = server.sockets[0].getsockname()
    try:
        for _ in range(3):
            clients.append(Client(*await asyncio.open_connection(*address)))
        yield app, state, clients
    finally:
        for client in clients:
            client.writer.close()
        app.gate.set()
        await until(lambda: not state.connections)
        server.close()
        assert budget.used == 0


def post(length: int) -> bytes:
    return b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % length


CHUNKED = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("head", [post(16 * MIB), CHUNKED + b"%x\r\n" % (16 * MIB)])
async def test_a_body_that_nobody_reads_is_not_received(head: bytes):
    """As before the key is checked."""
    budget = BodyBudget()
    async with served(budget) as (app, _, (client, *_)):
        app.gate.clear()
        client.writer.write(head + b" " * (8 * MIB))
        await until(lambda: app.running == 1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await client.writer.drain()
        assert 0 < budget.used < MIB


async def test_bodies_count_until_they_are_answered():
    budget = BodyBudget(4 * MIB)
    async with served(budget) as (_, _, (first, second, third)):
        for client in (first, second):
            client.writer.write(post(3 * MIB) + b" " * (MIB + MIB // 2))
        await until(lambda: budget.used == 3 * MIB)
        third.writer.write(post(2 * MIB) + b" " * (2 * MIB))
        status, _ = await third.answer()
        assert status == 503
        assert await third.ended()
        assert budget.used == 3 * MIB
        first.writer.close()  # it leaves within its body
        await until(lambda: budget.used == MIB + MIB // 2)
        second.writer.write(b" " * (MIB + MIB // 2))
        assert await second.answer() == (200, 3 * MIB)
        assert budget.used == 0
        second.writer.write(post(4 * MIB) + b" " * (4 * MIB))
        assert await second.answer() == (200, 4 * MIB)


async def test_a_released_body_counts_no_longer():
    budget = BodyBudget()
    async with served(budget) as (_, state, (client, *_)):
        client.writer.write(post(2 * MIB) + b" " * MIB)
        await until(lambda: budget.used == MIB)
        connection = next(one for one in state.connections if one._cycles)
        connection.release_body()
        connection.release_body()
        assert budget.used == 0
        client.writer.write(b" " * MIB)
        assert await client.answer() == (200, 2 * MIB)


async def test_the_body_of_a_pipelined_request_counts_on():
    """Its first bytes came with the end of the running request."""
    budget = BodyBudget()
    async with served(budget) as (app, state, (client, *_)):
        app.gate.clear()
        client.writer.write(post(10) + b" " * 10 + post(100) + b" " * 60)
        await until(lambda: budget.used == 70)
        connection = next(one for one in state.connections if one._cycles)
        connection.release_body()
        assert budget.used in (60, 60 + len(post(100)))  # parsed, or as bytes that wait
        app.gate.set()
        assert await client.answer() == (200, 10)
        client.writer.write(b" " * 40)
        assert await client.answer() == (200, 100)


async def test_pipelined_bytes_count_and_are_dropped_over_the_budget():
    """The running request is answered, and the first dropped one by an error."""
    budget = BodyBudget(1 << 15)
    async with served(budget) as (app, state, (client, other, _)):
        app.gate.clear()
        client.writer.write(post(10) + b" " * 10)
        await until(lambda: app.running == 1)
        other.writer.write(post(10) + b" " * 10)
        await until(lambda: app.running == 2)
        client.writer.write((post(1000) + b" " * 1000) * 4000)
        await until(lambda: any(one._discarding for one in state.connections))
        assert budget.used == 20
        app.gate.set()
        assert await client.answer() == (200, 10)
        assert (await client.answer())[0] == 503
        assert await client.ended()
        assert await other.answer() == (200, 10)
        other.writer.write(post(5) + b" " * 5)
        assert await other.answer() == (200, 5)


@pytest.mark.parametrize("ended", [False, True])
async def test_the_headers_of_an_unfinished_head_are_bounded_in_number(ended: bool):
    """Each costs many times its bytes; trailers as well."""
    async with served(BodyBudget()) as (_, _, (client, *_)):
        begin = b"GET / HTTP/1.1\r\nHost: x\r\n" if not ended else CHUNKED + b"0\r\n"
        client.writer.write(begin + b"a:\r\n" * 3_000)
        status, _ = await client.answer()
        assert status == 400
        assert await client.ended()
