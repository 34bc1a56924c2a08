"""HTTP/1.1 as the router's server implements it, over real sockets."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit

import pytest
from starlette.types import Receive, Scope, Send
from waiting import until

from engine.web import BodyBudget
from router.api.app import build_app
from router.api.connections import Connections
from router.api.http import HttpRequest, HttpResponse
from router.server import listen

pytestmark = pytest.mark.slow  # all of them: each waits a little

ASK = json.dumps({"prompt": [1, 2, 3], "max_tokens": 5, "temperature": 0}).encode()
STREAM = ASK[:-1] + b', "stream": true}'


def post(body: bytes, *headers: str, path: str = "/v1/completions", version: str = "1.1") -> bytes:
    lines = [f"POST {path} HTTP/{version}", "Host: localhost", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, *headers, "", ""]).encode() + body


def get(path: str, *headers: str, method: str = "GET") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: localhost", *headers, "", ""]).encode()


CHUNKED = post(b"", "Transfer-Encoding: chunked").replace(b"Content-Length: 0\r\n", b"")
PARTS = b"%x\r\n%b\r\n0\r\n\r\n" % (len(ASK), ASK)


class Client:
    """A raw connection to the server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self.writer = reader, writer

    async def head(self) -> tuple[int, dict[str, str]]:
        """Return status and headers of the next answer, all lower case."""
        async with asyncio.timeout(10):
            text = (await self._reader.readuntil(b"\r\n\r\n")).decode()
        status, *lines = text.split("\r\n")[:-2]
        headers = dict(line.lower().split(": ", 1) for line in lines)
        return int(status.split()[1]), headers

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body of the next answer, which must have a Content-Length."""
        status, headers = await self.head()
        return status, headers, await self._reader.readexactly(int(headers["content-length"]))

    async def rest(self) -> bytes:
        """Return the bytes up to the end of the connection."""
        async with asyncio.timeout(10):
            return await self._reader.read()


@pytest.fixture
async def served(route, fake):
    """A router with one scripted engine, that engine, and a function that opens a connection."""
    engine, writers = fake("a"), []

    async def connect() -> Client:
        parts = urlsplit(r.server.url)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        writers.append(writer)
        return Client(reader, writer)

    async with route(engine, max_body_mb=1, client_stall_s=1.0) as r:
        yield r, engine, connect
        for writer in writers:
            writer.close()


async def test_a_connection_serves_one_request_after_the_other(served):
    _, _, connect = served
    client = await connect()
    for _ in range(3):
        client.writer.write(post(ASK))
        status, headers, body = await client.answer()
        assert (status, json.loads(body)["object"]) == (200, "text_completion")
        assert "connection" not in headers
        assert headers["date"].endswith("gmt")


async def test_pipelined_requests_are_answered_in_order(served):
    """A slow first request and a malformed one do not change the order."""
    _, engine, connect = served
    engine.gate = asyncio.Event()
    client = await connect()
    client.writer.write(post(ASK, "X-Request-Id: 1") + post(b"{", "X-Request-Id: 2"))
    client.writer.write(get("/version", "X-Request-Id: 3") + b"nonsense\r\n\r\n")
    await engine.until(lambda: engine.running == 1)
    engine.gate.set()
    for name, wanted in (("1", 200), ("2", 400), ("3", 200)):
        status, headers, _ = await client.answer()
        assert (status, headers["x-request-id"]) == (wanted, name)
    status, headers, _ = await client.answer()
    assert (status, headers["connection"]) == (400, "close")
    assert await client.rest() == b""


async def test_a_request_may_arrive_byte_by_byte(served):
    _, _, connect = served
    client = await connect()
    for byte in post(ASK, "X-Request-Id: slow"):
        client.writer.write(bytes([byte]))
        await client.writer.drain()
        await asyncio.sleep(0)
    status, headers, _ = await client.answer()
    assert (status, headers["x-request-id"]) == (200, "slow")


async def test_a_chunked_body_is_read(served):
    _, _, connect = served
    client = await connect()
    client.writer.write(CHUNKED)
    for part in (ASK[:7], ASK[7:]):
        client.writer.write(b"%x\r\n%b\r\n" % (len(part), part))
        await asyncio.sleep(0.01)
    client.writer.write(b"0\r\n\r\n")
    assert (await client.answer())[0] == 200


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_too_large_body_is_refused_before_it_has_arrived(served, chunked):
    """A client that keeps sending can still read the error."""
    _, _, connect = served
    client = await connect()
    if chunked:
        client.writer.write(CHUNKED + b"%x\r\n" % 2**24 + b" " * (2**20 + 1))
    else:
        client.writer.write(post(b" " * 2**22)[: 2**21])
    status, headers, body = await client.answer()
    assert (status, headers["connection"]) == (413, "close")
    assert json.loads(body)["error"]["code"] == "too_large"
    client.writer.write(b" " * 2**16)
    assert await client.rest() == b""


async def test_expect_100_continue_is_answered(served):
    _, _, connect = served
    client = await connect()
    whole = post(ASK, "Expect: 100-continue")
    client.writer.write(whole[: -len(ASK)])
    assert (await client.head())[0] == 100
    client.writer.write(ASK)
    assert (await client.answer())[0] == 200


async def test_http_1_0_gets_no_chunks_and_no_keep_alive(served):
    _, _, connect = served
    client = await connect()
    client.writer.write(post(STREAM, version="1.0"))
    status, headers = await client.head()
    assert (status, headers["connection"]) == (200, "close")
    assert "transfer-encoding" not in headers
    assert (await client.rest()).endswith(b"data: [DONE]\n\n")
    client = await connect()
    client.writer.write(post(ASK, "Connection: keep-alive", version="1.0") * 2)
    status, headers, _ = await client.answer()
    assert (status, headers["connection"]) == (200, "close")
    assert await client.rest() == b""


async def test_a_stream_is_chunked_and_keeps_the_connection_open(served):
    _, _, connect = served
    client = await connect()
    client.writer.write(post(STREAM) + post(ASK, "Connection: close"))
    status, headers = await client.head()
    assert (status, headers["transfer-encoding"]) == (200, "chunked")
    assert "content-length" not in headers
    rest = await client.rest()
    streamed, _, answer = rest.partition(b"\r\n0\r\n\r\n")
    assert streamed.endswith(b"data: [DONE]\n\n")
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")


async def test_methods_and_paths(served):
    _, _, connect = served
    client = await connect()
    client.writer.write(get("/health", method="HEAD") + get("/health"))
    status, headers = await client.head()
    length = headers["content-length"]
    status, headers, _ = await client.answer()
    assert (status, headers["content-length"]) == (200, length)
    for request, wanted in (
        (get("/v1/completions"), 405),
        (get("/nowhere"), 404),
        (get("/%68ealth?x=1"), 200),
        (get("http://elsewhere/health"), 200),
        (get("http://elsewhere"), 404),
        (get("http://elsewhere?x=1"), 404),
        (get("*", method="OPTIONS"), 404),
        (get("/admin/requests/a%2Fb"), 404),
    ):
        client.writer.write(request)
        status, headers, body = await client.answer()
        assert status == wanted, (request, body)
        if wanted == 405:
            assert headers["allow"] == "post"  # `head` returns lower case
    assert b"a/b" in body  # the receipt's id, decoded


async def test_no_spelling_of_a_path_bypasses_the_keys(route, fake):
    async with route(fake("a"), api_key="k", admin_key="a") as r:
        parts = urlsplit(r.server.url)
        for path in ("/admin/engines", "/%61dmin/engines", "/admin%2Fengines", "//admin/engines"):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
            writer.write(get(path, "Authorization: Bearer k"))
            status, _, _ = await Client(reader, writer).answer()
            assert status == (404 if path.startswith("//") else 401), path
            writer.close()


async def test_a_request_to_upgrade_is_served_by_http_1_1(served):
    _, _, connect = served
    client = await connect()
    client.writer.write(get("/version", "Connection: Upgrade", "Upgrade: h2c") + b"PRI * HTTP/2.0")
    status, headers, _ = await client.answer()
    assert (status, headers["connection"]) == (200, "close")
    assert await client.rest() == b""


async def test_a_body_with_an_ignored_upgrade_is_read(served):
    """Java's client and `curl --http2` send such upgrades. The body may arrive in any parts."""
    _, _, connect = served
    whole = post(ASK, "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMA")
    for cut in (len(whole), len(whole) - len(ASK), len(whole) - 3):
        client = await connect()
        client.writer.write(whole[:cut])
        await asyncio.sleep(0.02)
        client.writer.write(whole[cut:] + b"PRI * HTTP/2.0")
        status, headers, body = await client.answer()
        assert (status, headers["connection"]) == (200, "close"), body
        assert await client.rest() == b""


@pytest.mark.parametrize(
    "request_",
    [  # those with a coding have a valid body, so that nothing else is wrong with them
        get("/version").replace(b"Host: localhost\r\n", b""),
        get("/version", "Host: elsewhere"),
        get("/version").replace(b"HTTP/1.1", b"HTTP/2.0"),
        CHUNKED.replace(b"chunked", b"gzip, chunked") + PARTS,
        CHUNKED.replace(b"HTTP/1.1", b"HTTP/1.0") + PARTS,
        CHUNKED.replace(b"POST /v1/completions", b"GET /version").replace(
            b"Host", b"Connection: Upgrade\r\nUpgrade: h2c\r\nHost"
        ) + PARTS,
        CHUNKED.replace(b"Host", b"Content-Length: 3\r\nHost") + PARTS,
        CHUNKED + b"0\r\nX: " + b"a" * 2**20,
        CHUNKED + b"0;" + b"a" * 2**20,
        get("/version", "X: " + "a" * 2**14),
        get("/version", *(f"X{i}: 1" for i in range(200))),
    ],
    ids=[
        "host", "hosts", "version", "coding", "old", "upgrade", "lengths", "trailer", "extension",
        "header", "headers",
    ],
)  # fmt: skip
async def test_malformed_requests_are_a_400(served, request_):
    _, _, connect = served
    client = await connect()
    client.writer.write(request_)
    status, headers, _ = await client.answer()
    assert (status, headers["connection"]) == (400, "close")


async def test_trailers_do_not_change_the_request(served):
    _, _, connect = served
    client = await connect()
    client.writer.write(CHUNKED + b"%x\r\n%b\r\n0\r\n" % (len(ASK), ASK))
    client.writer.write(b"X-Request-Id: trailer\r\nX-Request-Timeout: 0.000001\r\n\r\n")
    status, headers, _ = await client.answer()
    assert status == 200 and headers["x-request-id"] != "trailer"


@pytest.mark.slow
async def test_a_long_body_does_not_count_towards_the_next_head(served):
    _, _, connect = served
    client = await connect()
    long = json.dumps({"prompt": [1, 2, 3], "max_tokens": 1, "user": "u" * 240_000}).encode()
    client.writer.write(post(long) + get("/version")[:9])
    assert (await client.answer())[0] == 200
    client.writer.write(get("/version")[9:])
    assert (await client.answer())[0] == 200
    count = 2_500
    client.writer.write(get("/version") * count + get("/version")[:9])
    for _ in range(count):
        assert (await client.answer())[0] == 200
    client.writer.write(get("/version")[9:])
    assert (await client.answer())[0] == 200


class Echo:
    """An application that answers each request with `size` bytes once `gate` is set."""

    def __init__(self, size: int) -> None:
        self.answer = b"x" * size
        self.gate = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        http = HttpRequest(scope, receive, send, max_body=0, extra_headers=lambda _: [])
        http.connection.cancels(asyncio.current_task())
        with suppress(asyncio.CancelledError):
            await self.gate.wait()
            await http.respond(HttpResponse(self.answer))


@asynccontextmanager
async def echoing(size: int) -> AsyncIterator[tuple[Echo, Connections, Client]]:
    """Serve an `Echo` with small socket buffers and connect to it."""
    service = Echo(size)
    connections = Connections(service, BodyBudget())
    listener = listen("127.0.0.1", 0)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**12)
    server = await asyncio.get_running_loop().create_server(connections.connection, sock=listener)
    reader, writer = await asyncio.open_connection(*listener.getsockname(), limit=2**12)
    try:
        yield service, connections, Client(reader, writer)
    finally:
        writer.close()
        server.close()
        await connections.close(1.0)


@pytest.mark.parametrize("answered", [False, True])
@pytest.mark.slow
async def test_a_client_that_does_not_read_is_buffered_within_bounds(answered):
    """Neither answers nor requests pile up, and each write ends in the middle of a request."""
    async with echoing(10_000) as (service, connections, client):
        if answered:
            service.gate.set()
        ask = get("/")
        client.writer.write(ask[:-7])
        for _ in range(100):
            client.writer.write((ask[-7:] + ask[:-7]) * 1000)
            await asyncio.sleep(0.001)
        (connection,) = connections.open
        assert len(connection.pipeline) < 200  # of 100,000; the rest is not parsed yet
        assert len(connection._waiting) < 2**19  # at most the bytes of two reads
        assert connection.transport.get_write_buffer_size() < 2**17


@pytest.mark.slow
async def test_the_server_closes_after_its_last_answer_is_sent():
    async with echoing(8_000_000) as (service, connections, client):
        client.writer.write(get("/") * 2)
        await until(lambda: bool(connections.open))
        service.gate.set()
        assert (await client.head())[0] == 200
        closing = asyncio.ensure_future(connections.close(10.0))
        assert len(await client.rest()) == 8_000_000  # the second answer is not begun
        await closing


async def test_a_client_that_leaves_as_its_next_request_begins_is_no_error(served, caplog):
    """The server sees the client's end of stream when it has just started the second request."""
    gate, api = asyncio.Event(), build_app(served[0].server.router)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/version":
            await api(scope, receive, send)
            return
        await gate.wait()
        http = HttpRequest(scope, receive, send, max_body=0, extra_headers=lambda _: [])
        await http.respond(HttpResponse())

    connections = Connections(app, BodyBudget())
    listener = listen("127.0.0.1", 0)
    server = await asyncio.get_running_loop().create_server(connections.connection, sock=listener)
    with socket.create_connection(listener.getsockname()) as client:
        client.sendall(get("/first") + get("/version"))
        await until(lambda: any(connection.pipeline for connection in connections.open))
        gate.set()
        client.shutdown(socket.SHUT_WR)
        await until(lambda: not connections.open)
    server.close()
    await connections.close(1.0)
    assert not [record for record in caplog.records if record.name.startswith("uvicorn")]


async def test_a_head_request_for_an_event_stream_ends(served):
    _, _, connect = served
    client = await connect()
    client.writer.write(get("/admin/events", method="HEAD") + get("/version"))
    assert (await client.head())[0] == 200
    assert (await client.answer())[0] == 200


@pytest.mark.parametrize("behind", [b"", get("/version")])
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_client_that_leaves_ends_its_request(served, streamed, behind):
    r, engine, connect = served
    engine.gate = asyncio.Event()
    client = await connect()
    client.writer.write(post(STREAM if streamed else ASK, "X-Request-Id: left") + behind)
    await engine.until(lambda: engine.running == 1)
    client.writer.close()
    await engine.until(lambda: engine.running == 0)
    await r.settled()
    assert r.server.router.receipts["left"].status == "cancelled"


async def test_idle_connections_are_closed(served, monkeypatch):
    monkeypatch.setattr("engine.web.protocol.KEEPALIVE_S", 0.0)
    _, _, connect = served
    client = await connect()
    client.writer.write(get("/version"))
    assert (await client.answer())[0] == 200
    assert await client.rest() == b""


async def test_a_refused_client_that_never_hangs_up_is_dropped(served, monkeypatch, caplog):
    monkeypatch.setattr("engine.web.connection.LINGER_S", 0.1)
    _, _, connect = served
    client = await connect()
    client.writer.write(post(b" " * 2**22)[: 2**16])
    assert (await client.answer())[0] == 413
    await asyncio.sleep(0.3)
    with pytest.raises(ConnectionError):
        for _ in range(100):
            client.writer.write(b" " * 2**10)
            await client.writer.drain()
            await asyncio.sleep(0.01)
    assert not [record for record in caplog.records if record.name.startswith("uvicorn")]


async def test_a_key_is_checked_before_a_body_arrives(route, fake):
    async with route(fake("a"), api_key="k") as r:
        parts = urlsplit(r.server.url)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        writer.write(post(b" " * 2**19, "Expect: 100-continue")[: -(2**19)])
        status, headers, _ = await Client(reader, writer).answer()
        assert (status, headers["connection"]) == (401, "close")
        writer.close()


async def test_empty_lines_do_not_keep_a_connection_open(route, fake):
    async with route(fake("a"), body_timeout_s=0.1) as r:
        parts = urlsplit(r.server.url)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        client = Client(reader, writer)
        writer.write(get("/version"))
        assert (await client.answer())[0] == 200
        writer.write(b"\r\n")
        assert await client.rest() == b""
        writer.close()


async def test_more_pipelined_requests_than_fit_are_all_answered(served):
    """Send requests of several kinds, many more than the server parses ahead or keeps."""
    _, _, connect = served
    client = await connect()
    many = (get("/version") + post(ASK) + get("/health", method="HEAD")) * 350
    writing = asyncio.ensure_future(write_all(client, many))
    for _ in range(350):
        assert json.loads((await client.answer())[2]).keys() == {"version"}
        assert json.loads((await client.answer())[2])["object"] == "text_completion"
        assert (await client.head())[0] == 200
    await writing


async def write_all(client: Client, data: bytes) -> None:
    client.writer.write(data)
    await client.writer.drain()
