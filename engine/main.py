"""The process of an engine, from its flags to a clean end."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import dataclasses
import ipaddress
import logging
import os
import secrets
import signal
import socket
import ssl
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Protocol

import uvicorn

from engine.api.departure import Departure
from engine.api.registration import announce
from engine.flags import parse_cpus, parse_flags
from engine.kernels.cpu_features import mkl_mode
from engine.protocol.config import EngineConfig
from engine.web import (
    BodyBudget,
    ConnectionLimit,
    LimitedHttpProtocol,
    SlowClients,
    most_connections,
)

if TYPE_CHECKING:
    from engine.api.gate import Gate
    from engine.service.metrics import EngineMetrics

__all__ = ["main", "parse_flags"]

log = logging.getLogger("engine")

PR_SET_PDEATHSIG = 1


class ShownEngine(Protocol):
    """What the server needs of an engine besides its HTTP application."""

    @property
    def metrics(self) -> EngineMetrics: ...
    @property
    def idle(self) -> bool:
        """Whether no generation, send or receive is under way."""
        ...

    def shut_down(self) -> None:
        """Refuse new calls and end running ones with an error."""
        ...


# How long the step loop and the event loop hold the interpreter lock while the other waits for it.
# Python's default of 5 ms would delay responses while a step runs Python code.
SWITCH_INTERVAL_S = 0.0005


def main(argv: Sequence[str]) -> int:
    """Run one engine until SIGTERM or SIGINT; return the exit code."""
    config = parse_flags(argv)
    logging.basicConfig(
        level=config.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    if config.parent_pid and not _die_with(config.parent_pid):
        return 1
    if config.cpus:
        os.sched_setaffinity(0, parse_cpus(config.cpus))
    if not config.api_key and not _is_loopback(config.host):
        print(f"error: --host {config.host} needs --api-key", file=sys.stderr)
        return 2
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    if mode := mkl_mode():
        os.environ.setdefault("MKL_CBWR", mode)
    secret = os.environ.get("MICROSERVE_SECRET", "").encode()
    if not secret:
        secret = secrets.token_bytes(32)
        if config.model != "mock":
            log.warning("without MICROSERVE_SECRET, this engine cannot exchange KV with others")
    # Importing torch takes a second; the flags are valid and the process is on its cores now.
    from engine.models import ModelError
    from engine.protocol import MicroserveError

    code = 0
    try:
        with asyncio.Runner(loop_factory=_new_event_loop) as runner:
            runner.run(_serve(config, secret))
    except (ModelError, MicroserveError) as error:
        print(f"error: {error}", file=sys.stderr)
        code = 2
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 1
    if config.backend == "vllm":
        # Its libraries write pages about objects that the interpreter has not freed.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _new_event_loop() -> asyncio.AbstractEventLoop:
    """Return a uvloop event loop if uvloop is installed, else asyncio's."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


async def _serve(config: EngineConfig, secret: bytes) -> None:
    from engine.api.gate import BODY_TIMEOUT_S

    running = _running_vllm if config.backend == "vllm" else _running
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    with socket.create_server((config.host, config.port), family=family, backlog=512) as listener:
        # asyncio sets TCP_NODELAY only on sockets with an explicit protocol number. Without the
        # option, each small response and event would wait up to 40 ms for the acknowledgement of
        # earlier data.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        host, port = listener.getsockname()[:2]
        config = dataclasses.replace(
            config, port=port, engine_id=config.engine_id or f"{host}:{port}"
        )
        # Lent memory needs the order of epochs. A wall clock may be wrong.
        epoch = max(time.time_ns(), 1)
        most = most_connections(config.max_connections)
        budget = BodyBudget(max(config.max_bodies_mb, config.max_body_mb) << 20)
        async with running(config, secret, epoch) as (engine, app):
            limit = ConnectionLimit(most, engine.metrics.connection_refused)
            engine.metrics.show_connections(lambda: limit.served)
            departure = Departure(config.drain_s, lambda: engine.idle)
            server = _server(
                engine,
                departure,
                uvicorn.Config(
                    app,
                    http=partial(  # type: ignore[arg-type]
                        LimitedHttpProtocol, budget=budget, limit=limit
                    ),
                    ws="none",
                    interface="asgi3",
                    log_config=None,
                    access_log=False,
                    server_header=False,
                    proxy_headers=False,
                    lifespan="off",
                    timeout_graceful_shutdown=1,
                    ssl_certfile=config.tls_cert or None,
                    ssl_keyfile=config.tls_key or None,
                    ssl_ca_certs=config.client_ca or None,
                    ssl_cert_reqs=ssl.CERT_REQUIRED if config.client_ca else ssl.CERT_NONE,
                ),
                f"engine {config.engine_id} ready {_listening(config)}",
            )
            async with asyncio.TaskGroup() as tasks:
                slow = SlowClients(lambda _reason: None, head_s=BODY_TIMEOUT_S)
                beside = [tasks.create_task(slow.watch(server.server_state.connections))]
                if config.router:
                    departure.announcing = tasks.create_task(announce(config))
                    beside.append(departure.announcing)
                await server.serve(sockets=[listener])
                for task in beside:
                    task.cancel()


@contextlib.asynccontextmanager
async def _running(
    config: EngineConfig, secret: bytes, epoch: int
) -> AsyncIterator[tuple[ShownEngine, Gate]]:
    """Run an engine with its model and its step loop, and close both afterwards.

    Yields it with its HTTP application.
    """
    from engine.build import build_engine

    if config.model == "mock":
        from engine.mock.openai import build_mock_app as build_app
    else:
        from engine.api.app import build_app

    # Claiming a lease may block on a stopped peer. This many claims may block before others wait.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(64, "claim"))
    engine = build_engine(config, secret, epoch)
    engine.loop.start()
    try:
        yield engine, build_app(engine, config, epoch)
    finally:
        await engine.mirrors.close()
        engine.loop.stop()
        await asyncio.to_thread(engine.close)


@contextlib.asynccontextmanager
async def _running_vllm(
    config: EngineConfig, secret: bytes, epoch: int
) -> AsyncIterator[tuple[ShownEngine, Gate]]:
    """Run a vLLM engine, and end it afterwards; yield it with its HTTP application."""
    from engine.api.app import build_api
    from engine.api.gate import Gate
    from engine.vllm.run import running_vllm

    async with running_vllm(config, secret, epoch) as engine:
        yield engine, Gate(build_api(engine, config), config)


def _server(
    engine: ShownEngine, departure: Departure, config: uvicorn.Config, ready: str
) -> uvicorn.Server:
    """Return a server that prints `ready` when it listens and ends on SIGTERM and SIGINT."""

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            print(ready, flush=True)

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            await departure.leave()
            # Otherwise uvicorn waits for open streams, cancels them, and logs each.
            engine.shut_down()
            await super().shutdown(sockets)

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            if self.should_exit:
                departure.hurry()
            super().handle_exit(sig, frame)

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            # uvicorn's version raises the signal again at the end: the exit code would not be 0.
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self.handle_exit, number, None)
            yield

    return Server(config)


def _listening(config: EngineConfig) -> str:
    """Return the URL it listens on, whatever it advertises."""
    return dataclasses.replace(config, advertise="").url


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _die_with(parent: int) -> bool:
    """Have the kernel kill this process when its parent ends; False if it has already ended."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent
