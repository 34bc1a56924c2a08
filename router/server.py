"""The router as a server: listens, says so, and stops when told."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from aiohttp import web

from router.app import make_app
from router.config import RouterConfig
from router.router import Router

__all__ = ["Server", "run", "serving"]

FIRST_LOOK_S = 5.0


@dataclass(frozen=True, slots=True)
class Server:
    """A router that listens at `url`."""

    url: str
    router: Router


@asynccontextmanager
async def serving(config: RouterConfig) -> AsyncIterator[Server]:
    """Serve while the body runs. On leaving, requests may go on for `shutdown_s`, then they are
    cancelled, which ends their leases and generations.

    Raises `OSError` if the address is taken, and what `Router.opened` raises.
    """
    listener = _listen(config.host, config.port)
    async with Router.opened(config) as router:
        runner = web.AppRunner(
            make_app(router),
            handler_cancellation=True,  # a client that goes away cancels its request
            access_log=None,
            shutdown_timeout=config.shutdown_s,
        )
        await runner.setup()
        try:
            await web.SockSite(runner, listener, backlog=1024).start()
            await router.registry.settled(FIRST_LOOK_S)
            yield Server(_url(config.host, listener.getsockname()[1]), router)
        finally:
            await runner.cleanup()
            listener.close()


async def run(config: RouterConfig) -> None:
    """Serve until SIGTERM, SIGINT or the parent's death; print one line when ready."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    with _watching(config.parent_pid, stop):
        async with serving(config) as server:
            print(f"router ready {server.url}", flush=True)
            await stop.wait()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError:
        listener.close()
        raise
    return listener


def _url(host: str, port: int) -> str:
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)  # noqa: S104
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"


class _watching:
    """Set `stop` when the process `pid` ends; nothing for 0."""

    def __init__(self, pid: int, stop: asyncio.Event) -> None:
        self._pid = pid
        self._stop = stop
        self._fd: int | None = None

    def __enter__(self) -> None:
        if not self._pid:
            return
        with suppress(ProcessLookupError):
            self._fd = os.pidfd_open(self._pid)
        if self._fd is None:
            self._stop.set()
        else:
            asyncio.get_running_loop().add_reader(self._fd, self._gone)

    def _gone(self) -> None:
        self._stop.set()
        self.__exit__()

    def __exit__(self, *_: object) -> None:
        if self._fd is not None:
            asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)
            self._fd = None
