"""More connections than a router or an engine may have: those that are served go on."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import httpx
import pytest
from forked import ForkedProcess, run_with_few_files
from router_process import until

from engine.web import connection_limit
from engine.web.connection_limit import SPARE

ASK = {"prompt": [1, 2, 3], "max_tokens": 5, "temperature": 0}
FILES = 192  # of a process
MOST = FILES // 2  # of its connections, by default


def request(method: str, path: str, body: object = None) -> bytes:
    data = b"" if body is None else json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


async def answer(url: str, data: bytes = b"") -> bytes:
    """Send bytes on a new connection; return all that comes back until it is closed."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        writer.write(data)
        async with asyncio.timeout(10):
            return await reader.read()
    finally:
        writer.close()


async def test_a_router_with_as_many_connections_as_it_may_have(route, fake, monkeypatch):
    engine = fake("a", gate=asyncio.Event())
    ask = request("POST", "/v1/completions", ASK)
    async with route(engine, max_connections=1) as r:
        url = r.server.url
        stream = asyncio.create_task(r.events("/v1/completions", ASK))
        await engine.until(lambda: engine.running == 1)
        head, _, body = (await answer(url, ask)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ")
        assert {b"connection: close", b"retry-after: 1"} <= {*head.lower().split(b"\r\n")}
        assert json.loads(body)["error"]["type"] == "overloaded"
        # Probes are served, but only one on each connection.
        probed = await answer(url, 2 * request("GET", "/health"))
        assert probed.startswith(b"HTTP/1.1 200 ") and probed.count(b"HTTP/1.1") == 1
        metrics = await answer(url, request("GET", "/metrics"))
        assert b"\nmicroserve_router_connections 1.0\n" in metrics
        assert b"\nmicroserve_router_connections_refused_total 3.0\n" in metrics
        # A body that has not arrived is not waited for.
        assert (await answer(url, ask[:-1])).startswith(b"HTTP/1.1 503 ")
        monkeypatch.setattr(connection_limit, "SPARE_S", 0.01)
        assert await answer(url) == b""  # a client that says nothing is soon disconnected
        engine.gate.set()
        assert (await stream)[-1] == "[DONE]"
        await r.settled()


async def test_places_become_free_and_the_rest_is_closed_at_once(route, fake, monkeypatch):
    monkeypatch.setattr(connection_limit, "SPARE", 2)
    async with route(fake("a"), max_connections=3) as r, asyncio.timeout(20):
        parts = urlsplit(r.server.url)
        clients = [await asyncio.open_connection(parts.hostname, parts.port) for _ in range(6)]
        with suppress(ConnectionError):  # a reset says the same
            assert await clients[5][0].read() == b""
        for _, writer in clients:
            writer.close()
        status = 0
        while status != 200:
            with suppress(aiohttp.ClientError):
                status, _ = await r.post("/v1/completions", ASK)


@contextmanager
def few_files(*command: str) -> Iterator[tuple[ForkedProcess, str]]:
    """Run an engine or a router that may open `FILES` files; yield it and its URL."""
    process = ForkedProcess(run_with_few_files, *command, "--port", "0", OPEN_FILES=str(FILES))
    try:
        yield process, process.line().split()[-1]
    finally:
        process.kill()


def connect(url: str, count: int) -> list[socket.socket]:
    parts = urlsplit(url)
    return [socket.create_connection((parts.hostname, parts.port), 20) for _ in range(count)]


def close(clients: list[socket.socket]) -> None:
    for client in clients:
        client.close()


def is_closed(client: socket.socket) -> bool:
    """Wait until the server closes the connection."""
    try:
        return client.recv(1) == b""
    except ConnectionError:
        return True


def open_files(process: ForkedProcess) -> int:
    return len(list(Path(f"/proc/{process.pid}/fd").iterdir()))


def status(http: httpx.Client, url: str) -> int:
    """Return the status of the answer; 0 if there is none."""
    try:
        return http.get(url).status_code
    except httpx.TransportError:
        return 0


@pytest.mark.slow
@pytest.mark.processes
def test_more_clients_than_open_files_harm_nobody():
    """Idle clients fill an engine and a router; then the router cannot open any file."""
    with ExitStack() as stack:
        engine, engine_url = stack.enter_context(few_files("engine", "mock", "--step-ms", "1"))
        router, url = stack.enter_context(few_files("router", "--engine", engine_url))
        early = stack.enter_context(httpx.Client(base_url=url, timeout=20, verify=False))
        limits = httpx.Limits(max_keepalive_connections=0)
        late = stack.enter_context(httpx.Client(limits=limits, timeout=20, verify=False))

        def serves() -> bool:
            return early.post("/v1/completions", json=ASK).status_code == 200

        assert serves()
        for target in (engine_url, url):
            crowd = connect(target, FILES)  # others have connections, too
            try:
                assert all(map(is_closed, crowd[MOST + SPARE :]))
                assert serves()
                for process in (engine, router):
                    assert open_files(process) < FILES - 16
                close(crowd[MOST:])
                crowd = [*crowd[:MOST], *connect(target, 5)]  # for places that became free
                until(lambda at=target: status(late, f"{at}/health") == 200)
                reply = late.post(f"{target}/v1/completions", json=ASK)
                assert (reply.status_code, reply.headers["connection"]) == (503, "close")
            finally:
                close(crowd)
            until(lambda at=target: status(late, f"{at}/version") == 200)
        # A limit that the router does not know of: accept() fails.
        _, hard = resource.prlimit(router.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(router.pid, resource.RLIMIT_NOFILE, (open_files(router) + 1, hard))
        crowd = connect(url, MOST // 2)
        try:
            assert early.get("/health").json()["engines"] == {"up": 1, "of": 1}
            assert serves()
        finally:
            close(crowd)
        resource.prlimit(router.pid, resource.RLIMIT_NOFILE, (FILES, hard))
        until(lambda: status(late, f"{url}/version") == 200)
        assert len(router.log.splitlines()) < 20, router.log
