"""The parent of worker processes: starts and restarts them, serves their store, drains all.

Each worker has a listening socket of its own on the same port (SO_REUSEPORT), and the kernel
spreads connections over them. The parent keeps all of these sockets open: what waits at the socket
of a dead worker is served by the worker that takes its place.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from asyncio.subprocess import PIPE, Process
from contextlib import suppress
from dataclasses import replace
from functools import partial

import msgspec

from router.agreement import ROUTERS
from router.base import (
    AwakeClock,
    RouterConfig,
    StartFailed,
    StoreUnavailable,
    child_environment,
    module_command,
    root_cause,
)
from router.server import FLUSH_S, listen, url_of, watching
from router.sharing import worker_name
from router.store import Link, MemoryStore, StoreServer
from router.telemetry import Samples, counters, merged

__all__ = ["run_workers"]

log = logging.getLogger(__name__)

READY_S = 60.0  # for a worker to start
ANSWER_S = 1.0  # for a worker to tell another one something
SILENT_S = 10.0  # without an answer, a worker is replaced: code of users may block it for good
RESTART_S = 1.0  # least time between two starts in one place
END_S = 10.0  # beyond the time for running requests, until a worker is killed


async def run_workers(config: RouterConfig) -> None:
    """Serve with `config.workers` processes until SIGTERM, SIGINT or the parent's death.

    Raises `OSError` if the address is taken, and `StartFailed` if a worker does not start; what is
    wrong is printed by the worker.
    """
    parent = _Parent(config)
    try:
        await parent.run()
    except ExceptionGroup as several:
        raise root_cause(several) from None
    finally:
        parent.close()


class _Worker:
    """One worker process, and what it has told last."""

    def __init__(self, process: Process, link: Link) -> None:
        self.process = process
        self.link = link
        self.ready = asyncio.Event()
        self.metrics: Samples = []


class _Parent:
    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._store = MemoryStore(asyncio.get_running_loop().time)
        self._server = StoreServer(self._store)
        self._workers: set[_Worker] = set()
        self._ended: Samples = []  # counters of workers that have ended
        self._stop = asyncio.Event()
        self._awake = AwakeClock()
        self._sockets: list[socket.socket] = []
        try:
            for _ in range(config.workers):
                port = self._sockets[0].getsockname()[1] if self._sockets else config.port
                listener = listen(config.host, port, shared=True)
                self._sockets.append(listener)
                listener.listen(1024)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for listener in self._sockets:
            listener.close()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        with watching(self._config.parent_pid, self._stop):
            async with asyncio.TaskGroup() as tasks:
                ticking = tasks.create_task(self._awake.run())
                first = [asyncio.Event() for _ in self._sockets]
                for listener, ready in zip(self._sockets, first, strict=True):
                    tasks.create_task(self._supervise(listener, ready))
                for ready in first:
                    await ready.wait()
                if not self._stop.is_set():
                    print(f"router ready {url_of(self._config, self._sockets[0])}", flush=True)
                await self._stop.wait()
                ticking.cancel()

    def _on_signal(self) -> None:
        """First signal: the workers finish the running requests. Second: they end them."""
        if self._stop.is_set():
            for worker in self._workers:
                _signal(worker, signal.SIGTERM)
        self._stop.set()

    async def _supervise(self, listener: socket.socket, started: asyncio.Event) -> None:
        """Keep a worker running at `listener`, until the parent stops."""
        clock = asyncio.get_running_loop().time
        while not self._stop.is_set():
            began = clock()
            worker = await self._start(listener)
            try:
                await self._attend(worker, started)
            finally:
                await self._end(worker)
            if self._stop.is_set():
                break
            pid, code = worker.process.pid, worker.process.returncode
            if not started.is_set():
                raise StartFailed(f"a worker did not start (exit code {code})")
            log.warning("worker %d has ended (exit code %s) and is started again", pid, code)
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, began + RESTART_S - clock())):
                    await self._stop.wait()
        started.set()

    async def _start(self, listener: socket.socket) -> _Worker:
        own, theirs = socket.socketpair()
        with theirs:
            config = replace(self._config, parent_pid=os.getpid())
            descriptors = (listener.fileno(), theirs.fileno())
            process = await asyncio.create_subprocess_exec(
                *module_command("router.workers", *map(str, descriptors)),
                stdin=PIPE,
                pass_fds=descriptors,
                env=child_environment(),
                start_new_session=True,  # a terminal's Ctrl-C comes from the parent only, once
            )
        handlers = dict(self._server.handlers)
        worker = _Worker(process, Link(own, handlers, {}))
        handlers["ready"] = partial(self._ready, worker)
        handlers["gather_metrics"] = partial(self._gather_metrics, worker)
        handlers["ask_others"] = partial(self._ask_others, worker)
        self._workers.add(worker)
        self._server.add(worker.link)
        if process.stdin is not None:
            process.stdin.write(msgspec.json.encode(config))
            process.stdin.close()
        return worker

    async def _attend(self, worker: _Worker, started: asyncio.Event) -> None:
        """Serve a worker's calls until it ends; kill it if it does not start or end in time."""
        async with asyncio.TaskGroup() as tasks:
            link = tasks.create_task(worker.link.run())
            ended = tasks.create_task(worker.process.wait())
            ready = tasks.create_task(worker.ready.wait())
            stop = tasks.create_task(self._stop.wait())
            bound_s: float | None = READY_S
            await asyncio.wait({ended, ready, stop}, timeout=bound_s, return_when="FIRST_COMPLETED")
            if ready.done():
                started.set()
                silent = tasks.create_task(self._silent(worker))
                await asyncio.wait({ended, stop, silent}, return_when="FIRST_COMPLETED")
                silent.cancel()
            bound_s = self._config.shutdown_s + FLUSH_S + END_S if self._stop.is_set() else 0.0
            if self._stop.is_set():
                _signal(worker, signal.SIGTERM)
            await asyncio.wait({ended}, timeout=bound_s)
            if not ended.done():
                log.error("worker %d does not end and is killed", worker.process.pid)
                _signal(worker, signal.SIGKILL)
                await ended
            worker.link.close()
            for task in (link, ready, stop):
                task.cancel()

    async def _silent(self, worker: _Worker) -> None:
        """Return when a worker has not answered for `SILENT_S`, in which this process ran."""
        since = self._awake()
        while self._awake() - since < SILENT_S:
            await asyncio.sleep(SILENT_S / 10)
            with suppress(StoreUnavailable):
                await worker.link.call("alive", timeout_s=SILENT_S / 2)
                since = self._awake()
        log.error("worker %d has not answered for %g s", worker.process.pid, SILENT_S)

    async def _end(self, worker: _Worker) -> None:
        self._workers.discard(worker)
        self._server.remove(worker.link)
        worker.link.close()
        self._ended = merged([self._ended, counters(worker.metrics)])
        await self._store.withdraw(ROUTERS, worker_name(worker.process.pid))
        if worker.process.returncode is None:
            _signal(worker, signal.SIGKILL)

    async def _ready(self, worker: _Worker) -> None:
        worker.ready.set()

    async def _gather_metrics(self, asking: _Worker) -> Samples:
        """Return the metrics of all workers but the one that asks, which has its own."""
        others = [worker for worker in self._workers if worker is not asking]
        await asyncio.gather(*map(self._update, others))
        await self._update(asking)  # it may end before it is asked again
        return merged([self._ended, *(worker.metrics for worker in others)])

    async def _update(self, worker: _Worker) -> None:
        with suppress(StoreUnavailable):
            told = await worker.link.call("metrics", timeout_s=ANSWER_S)
            worker.metrics = msgspec.convert(told, Samples)

    async def _ask_others(
        self, asking: _Worker, question: str, arguments: list[object]
    ) -> list[object]:
        """Return what all workers but the one that asks answer, without those that do not."""

        async def ask(worker: _Worker) -> list[object]:
            with suppress(StoreUnavailable):
                return [await worker.link.call(question, *arguments, timeout_s=ANSWER_S)]
            return []

        others = [worker for worker in self._workers if worker is not asking]
        return [one for told in await asyncio.gather(*map(ask, others)) for one in told]


def _signal(worker: _Worker, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        worker.process.send_signal(number)
