"""An engine's HTTP client and its multiplexed token stream, against raw sockets."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from waiting import until

from engine.protocol import Draining, Internal
from router.base.errors import EngineUnreachable, NobodyListens
from router.engines.http_client import HttpClient
from router.engines.token_mux import MuxStream, TokenMux

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@asynccontextmanager
async def served(handler: Handler) -> AsyncIterator[HttpClient]:
    """Serve `handler` on each connection; yield a client of that server."""
    server = await asyncio.start_server(handler, "127.0.0.1", 0)
    http = HttpClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    try:
        yield http
    finally:
        http.close()
        server.close()


@asynccontextmanager
async def streaming() -> AsyncIterator[tuple[MuxStream, asyncio.StreamWriter]]:
    """Yield an open stream and the engine's writer to it."""
    opened: asyncio.Future[asyncio.StreamWriter] = asyncio.get_running_loop().create_future()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HEAD + chunk(b"\n"))
        opened.set_result(writer)
        await reader.read()
        writer.close()

    async with served(answer) as http:
        stream = await TokenMux(http).stream()
        yield stream, await opened


async def test_frames_reach_their_requests_however_they_are_split():
    async with streaming() as (stream, engine):
        one, other = stream.expect("a"), stream.expect("b")
        frames = (
            b'{"a": {"token_ids": [1], "text": "x", "begin": 3}, "b": {"token_ids": [7]}}\n'
            b'{"nobody": {"token_ids": [5]}}\n'
            b'{"a": {"token_ids": [2], "finish_reason": "stop", "usage": '
            b'{"prompt_tokens": 4, "completion_tokens": 2, "cached_tokens": 0}}}\n'
        )
        for at in range(len(frames)):
            engine.write(chunk(frames[at : at + 1]))
            await engine.drain()
        tokens, chunks = [], []
        while not chunks or chunks[-1].finish_reason is None:
            chunks.append(await one.next())
            tokens += chunks[-1].token_ids
        assert (tokens, chunks[0].begin, chunks[-1].usage.completion_tokens) == ([1, 2], 3, 2)
        assert (await other.next()).token_ids == [7]


async def test_a_lost_stream_fails_all_requests_after_their_received_tokens():
    async with streaming() as (stream, engine):
        one, other = stream.expect("a"), stream.expect("b")
        engine.write(chunk(b'{"a": {"token_ids": [1], "text": "x"}}\n'))
        await engine.drain()
        waiting = asyncio.ensure_future(other.next())
        await asyncio.sleep(0.01)
        engine.transport.abort()
        with pytest.raises(EngineUnreachable):
            await waiting
        assert (await one.next()).token_ids == [1]
        with pytest.raises(EngineUnreachable):
            await one.next()
        with pytest.raises(EngineUnreachable):
            await stream.expect("c").next()


async def test_an_error_event_is_raised_after_the_tokens_that_come_with_it():
    async with streaming() as (stream, engine):
        delivery = stream.expect("a")
        error = b'{"type": "draining", "message": "bye", "param": null, "code": null}'
        engine.write(chunk(b'{"a": {"token_ids": [1], "text": "x", "error": %b}}\n' % error))
        assert (await delivery.next()).token_ids == [1]
        with pytest.raises(Draining, match="bye"):
            await delivery.next()


async def test_an_invalid_frame_ends_the_stream():
    async with streaming() as (stream, engine):
        delivery = stream.expect("a")
        engine.write(chunk(b'{"a": {"token_ids": "no"}}\n'))
        with pytest.raises(EngineUnreachable, match="frame"):
            await delivery.next()
        assert stream.error is not None


async def test_a_lost_stream_is_replaced():
    lines = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal lines
        await reader.readuntil(b"\r\n\r\n")
        lines += 1
        writer.write(HEAD + chunk(b"\n"))
        if lines == 1:
            await writer.drain()
            writer.transport.abort()

    async with served(answer) as http:
        mux = TokenMux(http)
        first = await mux.stream()
        with pytest.raises(EngineUnreachable):
            await first.expect("a").next()
        again = await asyncio.gather(*(mux.stream() for _ in range(5)))
        assert {stream.id for stream in again} == {again[0].id}
        assert (again[0].id != first.id, lines) == (True, 2)


async def test_an_engine_without_streams_differs_from_an_unreachable_one():
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\nnone")

    async with served(refuse) as http:
        with pytest.raises(Internal, match="404"):
            await TokenMux(http).stream()


async def test_successive_calls_share_one_connection():
    connections = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        while await reader.readuntil(b"\r\n\r\n"):
            writer.write(b"HTTP/1.1 429 Full\r\nRetry-After: 7\r\nContent-Length: 2\r\n\r\n{}")

    async with served(answer) as http:
        for _ in range(3):
            reply = await http.call("GET", "/x")
            assert (reply.status, reply.retry_after, reply.body) == (429, "7", b"{}")
        assert connections == 1


async def test_a_cancelled_call_closes_its_connection():
    gone = asyncio.Event()

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await reader.read()
        gone.set()

    async with served(listen) as http:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await http.call("GET", "/x")
        async with asyncio.timeout(5):
            await gone.wait()


async def test_a_failed_calls_error_names_the_cause():
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.close()

    async with served(hang_up) as http:
        with pytest.raises(EngineUnreachable) as lost:
            await http.call("GET", "/x")
        assert not isinstance(lost.value, NobodyListens)
        url = http.url
    with pytest.raises(NobodyListens):
        await HttpClient(url).call("GET", "/x")
    with pytest.raises(EngineUnreachable):
        await HttpClient("http://127.0.0.1:99999").call("GET", "/x")
    with pytest.raises(ValueError, match="line break"):
        await HttpClient(url).call("GET", "/x", b"", {"X-Request-Id": "a\r\nEvil: 1"})


async def test_a_process_without_open_files_does_not_take_its_engines_for_dead(
    route, fake, monkeypatch
):
    """The request waits as if the engine were full, and the engine stays up."""
    a, missing = fake("a"), 0
    async with route(a, health_timeout_s=0.2) as r:
        (backend,) = r.server.router.registry
        loop = asyncio.get_running_loop()
        connect = loop.create_connection

        async def out_of_files(factory, host=None, port=None, **options):
            nonlocal missing
            if not a.url.endswith(f":{port}"):
                return await connect(factory, host, port, **options)
            missing += 1
            raise OSError(errno.EMFILE, "Too many open files")

        monkeypatch.setattr(loop, "create_connection", out_of_files)
        backend.client._http.retire()
        ask = {"prompt": [1, 2, 3], "max_tokens": 2, "timeout": 10}
        asked = asyncio.create_task(r.post("/v1/completions", ask))
        await until(lambda: missing > 8)
        assert (backend.status, asked.done()) == ("up", False)
        monkeypatch.undo()
        assert (await asked)[0] == 200
        assert (backend.status, backend.doubts) == ("up", 0)
