"""From flags to a running engine, and back to nothing."""

from __future__ import annotations

import argparse
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
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

import uvicorn

from engine.api.registration import announce, read_labels
from engine.protocol.config import EngineConfig

if TYPE_CHECKING:
    from engine.service.engine import MicroserveEngine

__all__ = ["main", "parse_flags"]

log = logging.getLogger("engine")

PR_SET_PDEATHSIG = 1
# Seconds after which the step loop and the event loop take turns. Python's 5 ms would be added to
# what a caller waits for, where a step is busy in Python.
TURN_S = 0.0005


def main(argv: Sequence[str]) -> int:
    """Run one engine until it is told to stop; returns the exit code."""
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
        print(f"error: listening on {config.host} needs --api-key", file=sys.stderr)
        return 2
    sys.setswitchinterval(TURN_S)
    secret = os.environ.get("MICROSERVE_SECRET", "").encode() or secrets.token_bytes(32)
    # Torch takes a second to import: after the flags are known to be good, and on its cores.
    from engine.models import ModelError
    from engine.protocol import MicroserveError

    try:
        with asyncio.Runner(loop_factory=_new_event_loop) as runner:
            runner.run(_serve(config, secret))
    except (ModelError, MicroserveError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def parse_flags(argv: Sequence[str]) -> EngineConfig:
    """An `EngineConfig` from a command line; bad flags exit with 2, as argparse does."""
    parser = argparse.ArgumentParser(prog="python -m engine", description=EngineConfig.__doc__)
    parser.add_argument("model", nargs="?", default=EngineConfig.model)
    hints = get_type_hints(EngineConfig)
    for flag in dataclasses.fields(EngineConfig):
        if flag.name == "model":
            continue
        kind = hints[flag.name]
        options: dict[str, Any] = {"type": kind}
        if choices := get_args(kind):
            options = {"choices": choices}
        if kind is bool:
            options = {"action": "store_true"}
        default = flag.default
        if flag.metadata.get("secret"):  # an argument can be read by everybody on the machine
            default = os.environ.get(f"MICROSERVE_ENGINE_{flag.name.upper()}", default)
        parser.add_argument(
            "--" + flag.name.replace("_", "-"),
            default=default,
            help=f"{flag.metadata['help']} (default: {flag.default!r})".replace("%", "%%"),
            **options,
        )
    try:
        config = EngineConfig(**vars(parser.parse_args(argv)))
        parse_cpus(config.cpus)
    except ValueError as error:
        parser.error(str(error))
    for name in (
        "page_size",
        "max_batch",
        "max_waiting",
        "token_budget",
        "lease_ms",
        "max_body_mb",
    ):
        if getattr(config, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    for name in (
        "pool_pages",
        "host_pages",
        "disk_pages",
        "threads",
        "parent_pid",
        "step_ms",
        "prefill_tokens_per_ms",
    ):
        if getattr(config, name) < 0:
            parser.error(f"--{name.replace('_', '-')} must not be negative")
    if config.decode_slowdown and not config.decode_slowdown >= 1:
        parser.error("--decode-slowdown must be at least 1, or 0")
    if config.router and not config.advertise and config.host in ("", "::", "0.0.0.0"):  # noqa: S104
        parser.error(f"on --host {config.host!r} a router needs --advertise to reach it by")
    if bool(config.tls_cert) != bool(config.tls_key):
        parser.error("--tls-cert and --tls-key go together")
    try:
        read_labels(config.labels)
    except ValueError as error:
        parser.error(str(error))
    if bool(config.disk_dir) != bool(config.disk_pages):
        parser.error("--disk-dir and --disk-pages go together")
    if config.disk_keep and not config.disk_pages:
        parser.error("--disk-keep needs --disk-pages")
    if not 0 <= config.port < 2**16:
        parser.error("--port must be between 0 and 65535")
    return config


def parse_cpus(text: str) -> set[int]:
    """`0,2-3` as {0, 2, 3}. Raises `ValueError`."""
    cpus: set[int] = set()
    for part in text.split(",") if text else ():
        first, dash, last = part.partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise ValueError(f"--cpus {text}: want cores as in 0,2-3")
        cpus |= set(range(int(first), int(last or first) + 1))
    if missing := cpus - os.sched_getaffinity(0):
        raise ValueError(f"--cpus {text}: core {min(missing)} is not available here")
    return cpus


def _new_event_loop() -> asyncio.AbstractEventLoop:
    """uvloop's, on platforms that have it."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


async def _serve(config: EngineConfig, secret: bytes) -> None:
    from engine.api.app import build_app

    new_app = build_app
    if config.model == "mock":
        from engine.mock.openai import build_mock_app as new_app

    with socket.create_server((config.host, config.port), backlog=512) as listener:
        # asyncio sets it on sockets that name their protocol only: each small answer, and each
        # event, would wait 40 ms for the caller's acknowledgement of what was written before.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        host, port = listener.getsockname()[:2]
        config = dataclasses.replace(
            config, port=port, engine_id=config.engine_id or f"{host}:{port}"
        )
        epoch = secrets.randbits(62) | 1
        async with _running(config, secret, epoch) as engine:
            server = _server(
                engine,
                uvicorn.Config(
                    new_app(engine, config, epoch),
                    log_config=None,
                    access_log=False,
                    lifespan="off",
                    timeout_graceful_shutdown=1,
                    timeout_keep_alive=75,
                    ssl_certfile=config.tls_cert or None,
                    ssl_keyfile=config.tls_key or None,
                ),
                f"engine {config.engine_id} ready {_listening(config)}",
            )
            async with asyncio.TaskGroup() as tasks:
                heartbeats = tasks.create_task(announce(config)) if config.router else None
                await server.serve(sockets=[listener])
                if heartbeats is not None:
                    heartbeats.cancel()


@contextlib.asynccontextmanager
async def _running(
    config: EngineConfig, secret: bytes, epoch: int
) -> AsyncIterator[MicroserveEngine]:
    """The engine with its model loaded and its step loop turning; all of it is gone afterwards."""
    from engine.build import build_engine

    # A claim may wait for a stopped peer: so many may, until others have to wait for them.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(64, "claim"))
    engine = build_engine(config, secret, epoch)
    engine.loop.start()
    try:
        yield engine
    finally:
        await engine.mirrors.close()
        engine.loop.stop()
        engine.cache.close()


def _server(engine: MicroserveEngine, config: uvicorn.Config, ready: str) -> uvicorn.Server:
    """A server that prints `ready` when it listens, and ends quietly on SIGTERM and SIGINT."""

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            print(ready, flush=True)

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            engine.shut_down()  # else it would wait for streams, and log those that it cuts off
            await super().shutdown(sockets)

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            # uvicorn's own raises the signal again when it is done: the exit code would not be 0.
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self.handle_exit, number, None)
            yield

    return Server(config)


def _listening(config: EngineConfig) -> str:
    """Where it listens, whatever it advertises."""
    return dataclasses.replace(config, advertise="").url


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _die_with(parent: int) -> bool:
    """Ask the kernel for SIGKILL when the parent ends; False if it has ended already."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent
