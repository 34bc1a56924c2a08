"""Slow clients and malformed requests, over real sockets."""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import pytest

ASK = {"prompt": [1, 2, 3], "max_tokens": 5, "temperature": 0}


@asynccontextmanager
async def connected(r, *, receive_buffer: int | None = None):
    """Open a raw connection to the router; a small receive buffer bounds the unread bytes."""
    parts = urlsplit(r.server.url)
    raw = socket.socket()
    if receive_buffer is not None:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    raw.setblocking(False)
    await asyncio.get_running_loop().sock_connect(raw, (parts.hostname, parts.port))
    reader, writer = await asyncio.open_connection(sock=raw, limit=2**16)
    try:
        yield reader, writer
    finally:
        writer.close()


def request(body: bytes, *headers: str) -> bytes:
    lines = ["POST /v1/completions HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, *headers, "", ""]).encode() + body


async def metrics(r) -> str:
    async with r.http.get(r.server.url + "/metrics") as response:
        return await response.text()


@pytest.mark.slow
async def test_a_client_that_does_not_read_is_dropped_and_delays_no_other(route, fake):
    """Its answer is far larger than the buffers between it and the engine."""
    a = fake("a")
    a.info = a.info.model_copy(update={"context_length": 10**6, "vocab_size": 10**6})
    a.text = "x" * 2**12
    async with route(a, client_stall_s=0.5) as r:
        async with connected(r, receive_buffer=4096) as (_, writer):
            ask = {**ASK, "max_tokens": 4000, "stream": True}
            writer.write(request(json.dumps(ask).encode(), "X-Request-Id: idle"))
            await a.until(lambda: a.running == 1)
            receipt = r.server.router.receipts["idle"]
            while receipt.status == "running":  # other requests are served meanwhile
                status, _ = await r.post("/v1/completions", {**ASK, "max_tokens": 2})
                assert status == 200
            assert receipt.status == "cancelled"
            await a.until(lambda: a.running == 0)
            await r.settled()
        assert 'slow_clients_total{reason="unread"} 1.0' in await metrics(r)


async def test_a_slow_reader_is_not_dropped(route, fake):
    a = fake("a")
    a.info = a.info.model_copy(update={"context_length": 10**6, "vocab_size": 10**6})
    a.text = "x" * 2**12
    async with route(a, client_stall_s=1.0) as r, connected(r, receive_buffer=4096) as (
        reader, writer,
    ):  # fmt: skip
        ask = {**ASK, "max_tokens": 1000, "stream": True}
        writer.write(request(json.dumps(ask).encode()))
        size, tail = 0, b""
        while b"[DONE]" not in tail:
            piece = await reader.read(2**14)
            assert piece, "it was dropped"
            size, tail = size + len(piece), (tail + piece)[-64:]
            await asyncio.sleep(0.001)
        assert size > 1000 * 2**12


@pytest.mark.slow
async def test_an_incomplete_head_or_body_times_out(route, fake):
    async with route(fake("a"), body_timeout_s=0.1) as r:
        async with connected(r) as (reader, writer):
            writer.write(request(b"{" * 10).replace(b"Content-Length: 10", b"Content-Length: 99"))
            assert b" 408 " in await reader.readline()
        async with connected(r) as (reader, writer):
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-A: ")
            assert await reader.read() == b""
        assert 'slow_clients_total{reason="no_request"} 1.0' in await metrics(r)


SMUGGLED = b"GET /admin/engines HTTP/1.1\r\nHost: localhost\r\n\r\n"
JUNK = {
    "both lengths": b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "two lengths": b"Content-Length: 4\r\nContent-Length: 40\r\n\r\nabcd" + SMUGGLED,
    "a length list": b"Content-Length: 4, 4\r\n\r\nabcd" + SMUGGLED,
    "a signed length": b"Content-Length: +4\r\n\r\nabcd" + SMUGGLED,
    "a negative length": b"Content-Length: -1\r\n\r\nabcd" + SMUGGLED,
    "an obscure coding": b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "chunked not last": b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "a space before the colon": b"Content-Length : 4\r\n\r\nabcd" + SMUGGLED,
    "a folded header": b"X-A: b\r\n Content-Length: 4\r\n\r\nabcd" + SMUGGLED,
    "a NUL": b"X-A: \0\r\nContent-Length: 0\r\n\r\n",
    "no colon": b"X-A\r\nContent-Length: 0\r\n\r\n",
    "a bare CR": b"X-A: b\rContent-Length: 4\r\n\r\nabcd" + SMUGGLED,
    "a bad chunk size": b"Transfer-Encoding: chunked\r\n\r\n0x4\r\nabcd\r\n0\r\n\r\n" + SMUGGLED,
    "a long header": b"X-A: " + b"b" * 20_000 + b"\r\nContent-Length: 0\r\n\r\n",
    "many headers": b"".join(b"X-%d: a\r\n" % n for n in range(500)) + b"\r\n",
}


@pytest.mark.parametrize("junk", JUNK.values(), ids=JUNK)
async def test_a_malformed_request_is_a_400_and_ends_the_connection(route, fake, junk):
    async with route(fake("a")) as r, connected(r) as (reader, writer):
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n" + junk)
        async with asyncio.timeout(10):
            answer = await reader.read()
        assert answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.0 400 ")), answer
        assert answer.count(b"HTTP/1.") == 1
        assert b"engine" not in answer


async def test_a_malformed_request_line_is_a_400(route, fake):
    async with route(fake("a")) as r:
        for line in (b"\x16\x03\x01\x02\x00\x01\x00", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n"):
            async with connected(r) as (reader, writer):
                writer.write(line + b"\r\n\r\n")
                async with asyncio.timeout(10):
                    assert b" 400 " in (await reader.read())[:20]
        assert (await r.post("/v1/completions", ASK))[0] == 200
