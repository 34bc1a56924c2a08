"""The router as a server: the composition root. Listens, prints its URL, stops on a signal."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import cast

from engine.web import BodyBudget, ConnectionLimit, SlowClients, most_connections
from router.admission.shutdown import Shutdown
from router.api.app import build_app
from router.api.connections import Connections
from router.api.parts import Router
from router.assembly import assembled
from router.base.config import RouterConfig
from router.base.process import hide_memory
from router.base.tls import server_context
from router.dry_run.fleet_check import check_on_fleet
from router.supervision.child_tasks import adopting
from router.supervision.watchdog import Watchdog

__all__ = ["FLUSH_S", "Server", "Worker", "listen", "run", "serving", "url_of", "watching"]

log = logging.getLogger(__name__)

FIRST_PROBES_S = 5.0
FLUSH_S = 1.0  # for clients to read responses that are complete


@dataclass(frozen=True, slots=True)
class Server:
    """A router that listens at `url`."""

    url: str
    router: Router


@dataclass(frozen=True, slots=True)
class Worker:
    """What a worker process has from its parent: where it listens, and the socket of their link."""

    listener: socket.socket
    link: socket.socket


@asynccontextmanager
async def serving(config: RouterConfig, worker: Worker | None = None) -> AsyncIterator[Server]:
    """Serve while the body runs.

    On exit the router still listens, and reports that it drains, until its requests have ended, for
    `shutdown_s` at most. Then it ends them with the error `draining`, and with them their leases
    and generations on engines. Clients have up to a second more to read that error.

    Raises `OSError` if the address is taken, `BadRequest` if certificate or key are unusable or the
    connections exceed the limit of open files, `Unsupported` if the strategy makes calls that the
    engines lack, and what `assembled` raises.
    """
    tls = server_context(config.tls_cert, config.tls_key)
    most = most_connections(config.max_connections)
    listener = listen(config.host, config.port) if worker is None else worker.listener
    async with assembled(config, worker.link if worker is not None else None) as router:
        budget = BodyBudget(max(config.max_bodies_mb, config.max_body_mb) << 20)
        limit = ConnectionLimit(most, router.metrics.connections_refused.inc)
        router.metrics.connections.set_function(lambda: limit.served)
        connections = Connections(build_app(router), budget, limit)
        watchdog = Watchdog(router.metrics, config.block_limit_s, router.events)
        slow = SlowClients(
            lambda reason: router.metrics.slow_clients.labels(reason).inc(),
            stall_s=config.client_stall_s,
            head_s=config.body_timeout_s,
        )
        loop = asyncio.get_running_loop()
        with watchdog.watching(), adopting(loop):
            server = await loop.create_server(
                connections.connection,
                sock=listener,
                backlog=1024,
                ssl=tls,
                ssl_handshake_timeout=config.body_timeout_s if tls else None,
            )
            try:
                async with asyncio.TaskGroup() as tasks:
                    watch = tasks.create_task(slow.watch(connections.open))
                    await router.registry.settled(FIRST_PROBES_S)
                    await _check_first(router)
                    try:
                        yield Server(url_of(config, listener), router)
                        await router.shutdown.finish(config.shutdown_s)
                        router.shutdown.end_requests()
                    finally:
                        watch.cancel()
            finally:
                server.close()
                # Streams of events do not end by themselves, so they are not waited for.
                router.events.close()
                await connections.close(min(FLUSH_S, config.shutdown_s))


async def _check_first(router: Router) -> None:
    """Raise `Unsupported` if the engines do not support what the strategy calls.

    While some of them have not answered, nothing is refused: these may support it.
    """
    if all(backend.status == "up" for backend in router.registry):
        first = router.rollout.revisions.active.bound
        fallbacks = await check_on_fleet(
            first, router.registry, router.catalog, own_file=router.config.strategy
        )
        if fallbacks:
            name = first.strategy.name
            log.warning("on these engines, %s falls back: %s", name, ", ".join(fallbacks))


async def run(config: RouterConfig, worker: Worker | None = None) -> None:
    """Serve until SIGTERM, SIGINT or the parent's death; print one line when ready.

    A worker tells its parent instead. A router that is still starting is not waited for.
    """
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    shutdowns: list[Shutdown] = []
    starting = cast("asyncio.Task[None]", asyncio.current_task())

    async def end_start() -> None:
        await stop.wait()
        starting.cancel()

    def on_signal() -> None:
        """First signal: finish the running requests. Second: end them."""
        if stop.is_set():
            for shutdown in shutdowns:
                shutdown.hurry()
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    if config.allow_upload:
        hide_memory()  # from the process of a dry run
    with watching(config.parent_pid, stop):
        ending = loop.create_task(end_start())
        try:
            async with serving(config, worker) as server:
                ending.cancel()
                shutdowns.append(server.router.shutdown)
                _tune_gc()
                if (peers := server.router.peers) is not None:
                    await peers.ready()
                elif not stop.is_set():
                    print(f"router ready {server.url}", flush=True)
                await stop.wait()
        except asyncio.CancelledError:
            if not stop.is_set():
                raise
            starting.uncancel()
            log.info("ended before it was ready")
        finally:
            ending.cancel()


def _tune_gc() -> None:
    """Exempt existing objects from garbage collection, and collect less often.

    Requests leave few reference cycles, so this saves a few percent of CPU.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def listen(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """Return a socket bound to an address. `shared`: other sockets of this user may have it too.

    Raises `OSError`, and `OverflowError` for a port out of range.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((host, port))
    except OSError:
        listener.close()
        raise
    return listener


def url_of(config: RouterConfig, listener: socket.socket) -> str:
    """Return the URL of a router that listens there."""
    scheme, host = "https" if config.tls_cert else "http", config.host
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)  # noqa: S104
    name = f"[{reachable}]" if ":" in reachable else reachable
    return f"{scheme}://{name}:{listener.getsockname()[1]}"


class watching:
    """Sets `stop` when the process `pid` ends. Does nothing for pid 0."""

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
