"""The memory of real processes under clients that send without a key, or more than is read."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from engine_process import EngineProcess
from router_process import RouterProcess

pytestmark = [pytest.mark.processes, pytest.mark.slow]

MIB = 1 << 20


class Peak:
    """The growth of a process's peak of resident memory since this was made."""

    def __init__(self, pid: int) -> None:
        self._process = Path(f"/proc/{pid}")
        (self._process / "clear_refs").write_text("5")  # the peak is what is resident now
        self._before = self._now()

    def _now(self) -> int:
        lines = (self._process / "status").read_text().splitlines()
        (line,) = (line for line in lines if line.startswith("VmHWM:"))
        return int(line.split()[1]) << 10

    @property
    def grown(self) -> int:
        return self._now() - self._before


def head(path: str, length: int = 0) -> bytes:
    line = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n"
    return line.encode()


async def attack(url: str, count: int, data: bytes) -> list[bytes]:
    """Send `data` on `count` connections at once, while all are open.

    Return the beginnings of the answers; none where the server waits for more.
    """
    parts = urlsplit(url)
    sent = asyncio.Barrier(count)

    async def one() -> bytes:
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        answer = asyncio.ensure_future(reader.read(12))
        try:
            writer.write(data)
            draining = asyncio.ensure_future(writer.drain())
            await asyncio.wait({draining, answer}, return_when=asyncio.FIRST_COMPLETED)
            draining.cancel()
            await asyncio.gather(draining, return_exceptions=True)
            await sent.wait()
            await asyncio.wait({answer}, timeout=0.05)
            return answer.result() if answer.done() and not answer.exception() else b""
        finally:
            answer.cancel()
            writer.transport.abort()

    async with asyncio.timeout(60):
        return await asyncio.gather(*(one() for _ in range(count)))


@pytest.fixture(params=["router", "engine"])
def keyed(request: pytest.FixtureRequest) -> Iterator[RouterProcess | EngineProcess]:
    if request.param == "router":
        process = RouterProcess([], "data_parallel", "--api-key", "k")
    else:
        process = EngineProcess("--api-key", "k", "--pool-pages", "200")
    yield process
    process.kill()


async def test_clients_without_a_key_cost_no_memory(keyed: RouterProcess | EngineProcess):
    path = "/v1/completions" if isinstance(keyed, RouterProcess) else "/microserving/prep_recv"
    assert keyed.http.get("/health").status_code == 200
    peak = Peak(keyed.pid)
    for way in (path, "/health", "/nowhere"):
        answers = await attack(keyed.url, 20, head(way, 8 * MIB) + b" " * (8 * MIB - 1))
        assert {answer[9:] for answer in answers} <= {b"401", b"413"}, answers
    # Pipelined behind each other, many times the size of one body
    body = head(path, 15 * MIB) + b" " * (15 * MIB)
    await attack(keyed.url, 3, body * 4)
    # Heads that never end, of the shortest headers
    await attack(keyed.url, 100, b"GET / HTTP/1.1\r\nHost: x\r\n" + b"a:\r\n" * 15_000)
    assert peak.grown < 48 * MIB, peak.grown / MIB
    assert keyed.http.get("/health").status_code == 200


@pytest.fixture(params=["router", "engine"])
def keyless(request: pytest.FixtureRequest) -> Iterator[RouterProcess | EngineProcess]:
    if request.param == "router":
        process = RouterProcess([], "data_parallel", "--max-bodies-mb", "32")
    else:
        process = EngineProcess("--pool-pages", "200", "--max-bodies-mb", "32")
    yield process
    process.kill()


async def test_bodies_without_end_stay_within_the_budget(keyless: RouterProcess | EngineProcess):
    path = "/v1/completions" if isinstance(keyless, RouterProcess) else "/microserving/prep_recv"
    assert keyless.http.get("/health").status_code == 200
    peak = Peak(keyless.pid)
    answers = await attack(keyless.url, 30, head(path, 8 * MIB) + b" " * (8 * MIB - 1))
    assert answers.count(b"") >= 3  # these wait for their last byte
    assert {answer[9:] for answer in answers if answer} == {b"503"}
    assert peak.grown < 96 * MIB, peak.grown / MIB
    assert keyless.http.get("/health").status_code == 200
