"""The memory of real processes under clients that send without a key, or more than is read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import pytest
from engine_process import EngineProcess
from peak_memory import PeakMemory
from router_process import RouterProcess

pytestmark = [pytest.mark.processes, pytest.mark.slow]

MIB = 1 << 20


def head(path: str, length: int = 0) -> bytes:
    line = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n"
    return line.encode()


@asynccontextmanager
async def attack(
    process: RouterProcess | EngineProcess,
    peak: PeakMemory,
    count: int,
    data: bytes,
    *,
    answered: bool,
) -> AsyncIterator[list[bytes]]:
    """Send `data` on each of `count` connections, which are open within the context.

    Yield the beginnings of the answers, of all connections if they are `answered`, once the process
    has taken what it takes.
    """
    parts = urlsplit(process.url)
    streams = [await asyncio.open_connection(parts.hostname, parts.port) for _ in range(count)]
    answers = [asyncio.ensure_future(reader.read(12)) for reader, _ in streams]
    for _, writer in streams:
        writer.write(data)
    sent = [asyncio.ensure_future(writer.drain()) for _, writer in streams]
    try:
        async with asyncio.timeout(60):
            for pair in zip(answers, sent, strict=True):
                await asyncio.wait(pair, return_when=asyncio.FIRST_COMPLETED)
            if answered:
                await asyncio.wait(answers)
            await settled(process, peak)
        yield [answer.result() for answer in answers if answer.done()]
    finally:
        for (_, writer), task in zip(streams, sent, strict=True):
            task.cancel()
            writer.transport.abort()
        await asyncio.gather(*answers, *sent, return_exceptions=True)


async def settled(process: RouterProcess | EngineProcess, peak: PeakMemory) -> None:
    """Wait until a few requests in turn have not changed the peak."""
    quiet = 0
    while quiet < 5:
        before = peak.grown
        assert (await asyncio.to_thread(process.http.get, "/health")).status_code == 200
        quiet = quiet + 1 if peak.grown == before else 0


def started(kind: str, *flags: str) -> Iterator[RouterProcess | EngineProcess]:
    """Yield a router without engines, or an engine."""
    process: RouterProcess | EngineProcess
    if kind == "router":
        process = RouterProcess([], "data_parallel", *flags)
    else:
        process = EngineProcess("--pool-pages", "200", *flags)
    yield process
    process.kill()


def target(process: RouterProcess | EngineProcess) -> tuple[str, PeakMemory]:
    """Return a path that takes bodies, and the memory of the process from now on."""
    path = "/v1/completions" if isinstance(process, RouterProcess) else "/microserving/prep_recv"
    assert process.http.get("/health").status_code == 200
    return path, PeakMemory(process.pid)


@pytest.fixture(params=["router", "engine"])
def keyed(request: pytest.FixtureRequest) -> Iterator[RouterProcess | EngineProcess]:
    yield from started(request.param, "--api-key", "k")


async def test_clients_without_a_key_cost_no_memory(keyed: RouterProcess | EngineProcess):
    path, peak = target(keyed)
    for way in (path, "/health", "/metrics", "/nowhere"):
        data = head(way, 8 * MIB) + b" " * (8 * MIB - 1)
        async with attack(keyed, peak, 20, data, answered=True) as answers:
            assert {answer[9:] for answer in answers} <= {b"401", b"413"}, answers
    # Heads that never end
    data = b"GET / HTTP/1.1\r\nHost: x\r\n" + b"abc:\r\n" * 10_000
    async with attack(keyed, peak, 100, data, answered=False):
        assert peak.grown < 32 * MIB, peak.grown / MIB


@pytest.fixture(params=["router", "engine"])
def keyless(request: pytest.FixtureRequest) -> Iterator[RouterProcess | EngineProcess]:
    yield from started(request.param, "--max-bodies-mb", "32")


async def test_bodies_without_end_stay_within_the_budget(keyless: RouterProcess | EngineProcess):
    path, peak = target(keyless)
    data = head(path, 8 * MIB) + b" " * (8 * MIB - 1)
    async with attack(keyless, peak, 30, data, answered=False) as answers:
        assert len(answers) <= 27  # the others wait for their last byte
        assert {answer[9:] for answer in answers} == {b"503"}
        assert peak.grown < 64 * MIB, peak.grown / MIB


async def test_nothing_is_parsed_behind_a_running_request(keyless: RouterProcess | EngineProcess):
    """The answer to the first request does not end."""
    endless = "/admin/events" if isinstance(keyless, RouterProcess) else "/microserving/prefixes"
    assert keyless.http.get("/health").status_code == 200
    peak = PeakMemory(keyless.pid)
    first = f"GET {endless} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
    small = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 100_000
    large = head("/", 8 * MIB) + b" " * (8 * MIB)
    for behind in (small, large):
        async with attack(keyless, peak, 20, first + behind, answered=True) as answers:
            assert {answer[9:] for answer in answers} == {b"200"}
            assert peak.grown < 40 * MIB, peak.grown / MIB
