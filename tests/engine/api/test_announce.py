"""Heartbeats to something that answers like no router: the engine serves on."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from raw_server import HEAD, RawServer
from waiting import until

from engine.api import registration
from engine.protocol import EngineConfig


@contextlib.asynccontextmanager
async def announced(router: str) -> AsyncIterator[asyncio.Task[None]]:
    """Register with `router` again and again while the body runs."""
    task = asyncio.create_task(
        registration.announce(EngineConfig(model="tiny", engine_id="mine", router=router))
    )
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(registration, "HEARTBEAT_S", 0.001)
    caplog.set_level(logging.INFO)


@pytest.mark.parametrize(
    "strange",
    [b"", b"[]", b"7", b'{"id": 7}', b'{"id": ""}', b'{"id": null}', b"[" * 10**5, b"\xff\xfe{"],
    ids=lambda reply: repr(reply[:12]),
)
async def test_a_strange_reply_is_a_failure_of_one_heartbeat(
    caplog: pytest.LogCaptureFixture, strange: bytes
):
    replies, deleted = [b'{"id": "a/b", "more": []}', strange], []

    async def register(request: web.Request) -> web.Response:
        return web.Response(body=replies.pop() if replies else b'{"id": "a/b"}')

    async def deregister(request: web.Request) -> web.Response:
        deleted.append(request.path_qs)
        return web.json_response({})

    app = web.Application()
    app.router.add_post("/admin/engines", register)
    app.router.add_delete("/admin/engines/{id}", deregister)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        async with announced(f"http://127.0.0.1:{runner.addresses[0][1]}") as task:
            await until(lambda: "registered with" in caplog.text or task.done())
            assert not task.done()
        assert "its reply names no engine" in caplog.text
        assert deleted == ["/admin/engines/a%2Fb?heartbeat=true"]
    finally:
        await runner.cleanup()


async def test_endless_replies_end(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(registration, "MOST_REPLY", 10_000)
    server = RawServer(HEAD, b"1000\r\n%b\r\n" % (b"x" * 4096))
    async with server.serving(), announced(server.url) as task:
        await until(lambda: len(server.heads) > 1 or task.done())
        assert not task.done()
    assert "more than 10000 bytes" in caplog.text


async def test_slow_replies_end(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    """Each byte comes within the timeout of a read."""
    monkeypatch.setattr(registration, "REGISTER_TIMEOUT_S", 0.05)
    server = RawServer(HEAD, b"1\r\nx\r\n", every_s=0.01)
    async with server.serving(), announced(server.url) as task:
        await until(lambda: len(server.heads) > 1 or task.done())
        assert not task.done()
    assert "no complete reply" in caplog.text


async def test_each_heartbeat_may_reach_another_router():
    """A service leads each connection to one of its routers, and a draining one keeps its own."""
    ports: list[int] = []

    async def register(request: web.Request) -> web.Response:
        ports.append(request.transport.get_extra_info("peername")[1])
        return web.json_response({"id": "mine"})

    app = web.Application()
    app.router.add_post("/admin/engines", register)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        async with announced(f"http://127.0.0.1:{runner.addresses[0][1]}") as task:
            await until(lambda: len(ports) > 2 or task.done())
        assert len(set(ports)) == len(ports)
    finally:
        await runner.cleanup()
