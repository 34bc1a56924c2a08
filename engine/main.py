"""The command line of an engine: from flags to a running process and its clean end."""

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
import shlex
import signal
import socket
import ssl
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol, get_args, get_type_hints

import uvicorn

from engine.api.departure import Departure
from engine.api.registration import announce, read_labels
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


def parse_flags(argv: Sequence[str]) -> EngineConfig:
    """Parse a command line. Bad flags exit with status 2, as argparse does."""
    parser = argparse.ArgumentParser(
        prog="python -m engine",
        usage="python -m engine [MODEL] [flags]",
        description="Run one engine. Engines that exchange KV need the same MICROSERVE_SECRET in "
        "their environment.",
    )
    parser.add_argument(
        "model",
        nargs="?",
        default=EngineConfig.model,
        help="alias, folder, .gguf file or hub id (default: %(default)s)",
    )
    headings = dict.fromkeys(
        flag.metadata["group"] for flag in dataclasses.fields(EngineConfig) if flag.metadata
    )
    groups = {heading: parser.add_argument_group(heading) for heading in headings}
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
        if flag.metadata.get("secret"):  # other users can read command lines
            default = os.environ.get(f"MICROSERVE_ENGINE_{flag.name.upper()}", default)
        shown = "" if flag.default in ("", False) else f" (default: {flag.default})"
        groups[flag.metadata["group"]].add_argument(
            "--" + flag.name.replace("_", "-"),
            default=default,
            help=(flag.metadata["help"] + shown).replace("%", "%%"),
            **options,
        )
    try:
        own, extra = _split(argv)
        config = EngineConfig(**vars(parser.parse_args(own)))
        if extra:
            given = shlex.join(extra)
            config = dataclasses.replace(config, vllm_args=f"{config.vllm_args} {given}".strip())
        parse_cpus(config.cpus)
        config.kv_port_range  # noqa: B018
    except ValueError as error:
        parser.error(str(error))
    for flag in dataclasses.fields(EngineConfig):
        if problem := _out_of_bounds(flag, getattr(config, flag.name)):
            parser.error(problem)
    if config.decode_slowdown and not config.decode_slowdown >= 1:
        parser.error("--decode-slowdown must be 0 or at least 1")
    if config.router and not config.advertise and config.host in ("", "::", "0.0.0.0"):  # noqa: S104
        parser.error(f"--router with --host {config.host!r} needs --advertise")
    if bool(config.tls_cert) != bool(config.tls_key):
        parser.error("--tls-cert and --tls-key go together")
    if config.client_ca and not config.tls_cert:
        parser.error("--client-ca needs --tls-cert: callers show certificates over https only")
    try:
        read_labels(config.labels)
    except ValueError as error:
        parser.error(str(error))
    if config.vllm_args and config.backend != "vllm":
        parser.error("vLLM's flags need --backend vllm")
    if config.has_workers and (refused := _not_split(config)):
        parser.error(f"--tp, --pp and --device-pages: {refused}")
    if config.lend_share and config.has_workers:
        parser.error("--lend-share does not go with --tp, --pp and --device-pages yet")
    if refused := _no_debtor(config):
        parser.error(f"--borrow: {refused}")
    if config.device_pages == 1:
        parser.error("--device-pages must be at least 2: it has a half for each of two steps")
    if bool(config.disk_dir) != bool(config.disk_pages):
        parser.error("--disk-dir and --disk-pages go together")
    if config.disk_keep and not config.disk_pages:
        parser.error("--disk-keep needs --disk-pages")
    if len(config.engine_id) > 256 or not config.engine_id.isprintable():
        parser.error("--engine-id must have at most 256 printable characters")
    return config


def _not_split(config: EngineConfig) -> str:
    """Return why these settings do not go with several workers; empty if they do."""
    if config.backend == "vllm":
        return "give vLLM its own flags, behind --"
    if config.model == "mock":
        return "the model mock has no layers"
    if config.device != "cpu":
        return "workers compute on CPUs so far"
    return ""


def _no_debtor(config: EngineConfig) -> str:
    """Return why an engine with these settings cannot borrow; empty if it can, or need not."""
    if not config.borrow:
        return ""
    if config.backend == "vllm":
        return "vLLM's attention reaches its own blocks only"
    if config.has_workers:
        return "does not go with --tp, --pp and --device-pages yet"
    if config.model == "mock":
        return "the model mock has no attention"
    if config.dtype == "float16":
        return "queries are shipped in float32 and bfloat16 only"
    return ""


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the arguments before a lone `--`, and those behind it."""
    arguments = list(argv)
    if "--" not in arguments:
        return arguments, []
    at = arguments.index("--")
    return arguments[:at], arguments[at + 1 :]


def _out_of_bounds(flag: dataclasses.Field[Any], value: Any) -> str:
    """Return what is wrong with the value of a flag that is a number; empty if nothing is."""
    least, most = flag.metadata.get("least"), flag.metadata.get("most")
    if least is None or most is None or least <= value <= most:
        return ""
    name = flag.name.replace("_", "-")
    return f"--{name} must be from {least:.12g} to {most:.12g}"


def parse_cpus(text: str) -> set[int]:
    """Parse `0,2-3` into {0, 2, 3}. Raises `ValueError`, also for unavailable cores."""
    cpus: set[int] = set()
    for part in text.split(",") if text else ():
        first, dash, last = part.partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise ValueError(f"--cpus {text}: expected cores as in 0,2-3")
        cpus |= set(range(int(first), int(last or first) + 1))
    if missing := cpus - os.sched_getaffinity(0):
        raise ValueError(f"--cpus {text}: core {min(missing)} is not available")
    return cpus


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
