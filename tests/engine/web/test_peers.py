"""What another process may send in reply to an engine's call."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import AsyncIterator

import httpx
import pytest
from lying_engine import ENDLESS, LyingEngine
from raw_server import HEAD, RawServer

from engine.protocol import PeerUnreachable
from engine.web import PeerReply, call_peer

MOST = 20_000


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=5.0) as client:
        yield client


async def called(client: httpx.AsyncClient, url: str, within_s: float = 20.0) -> PeerReply:
    return await call_peer(client, "POST", url, b"{}", most=MOST, within_s=within_s)


def whole(body: bytes, *headers: str, status: str = "200 OK") -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


@pytest.mark.parametrize("lie", [lie for lie, (path, *_) in ENDLESS.items() if path == "/health"])
async def test_an_endless_reply_is_given_up_by_its_bytes(client: httpx.AsyncClient, lie: str):
    async with LyingEngine(lie).serving() as liar:
        with pytest.raises(PeerUnreachable) as refused:
            await called(client, f"{liar.url}/health")
    assert "complete" not in refused.value.message, "only the time has ended it"


@pytest.mark.parametrize(
    "server",
    [
        RawServer(b"", every_s=0.01),
        RawServer(HEAD, b"1\r\nx\r\n", every_s=0.01),
        RawServer(b"HTTP/1.1 200 OK\r\nX-Slow: ", b"x", every_s=0.01),
        RawServer(b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 100 Continue\r\n\r\n", every_s=0.01),
    ],
    ids=["silence", "body", "head", "informational"],
)
async def test_a_slow_reply_is_given_up_by_its_time(client: httpx.AsyncClient, server: RawServer):
    """Each byte comes in time, and the whole never."""
    async with server.serving():
        with pytest.raises(PeerUnreachable, match=r"no complete reply within 0\.1 s"):
            await called(client, server.url, within_s=0.1)


async def test_a_reply_of_the_most_bytes_is_returned_whatever_its_status(client: httpx.AsyncClient):
    body = b"x" * MOST
    async with RawServer(whole(body, status="500 No"), None).serving() as server:
        assert await called(client, server.url) == PeerReply(500, body)
    async with RawServer(whole(body + b"x"), None).serving() as server:
        with pytest.raises(PeerUnreachable, match=f"more than {MOST} bytes"):
            await called(client, server.url)


@pytest.mark.parametrize(("name", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
async def test_a_compressed_reply_is_not_unpacked(client: httpx.AsyncClient, name: str, pack):
    packed = pack(bytes(1 << 20))
    async with RawServer(whole(packed, f"Content-Encoding: {name}"), None).serving() as server:
        assert (await called(client, server.url)).body == packed
        assert b"accept-encoding: identity\r\n" in server.heads[0].lower()


@pytest.mark.parametrize("first", [b"hello\r\n\r\n", b"", whole(b"xyz")[:-1]])
async def test_what_is_no_reply_is_unreachable(client: httpx.AsyncClient, first: bytes):
    async with RawServer(first, None).serving() as server:
        with pytest.raises(PeerUnreachable):
            await called(client, server.url)


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "nonsense", "http://[", ""])
async def test_a_bad_url_is_unreachable(client: httpx.AsyncClient, url: str):
    with pytest.raises(PeerUnreachable):
        await called(client, url)
